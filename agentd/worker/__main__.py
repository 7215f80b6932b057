"""`python -m agentd.worker`: see app.main."""

from __future__ import annotations

import os
import sys

# structlog imports rich, for tracebacks on a terminal, if it can: a third of the start-up
# of a process that replaces a dead one and has no terminal.
sys.modules["rich"] = None  # type: ignore[assignment]
import structlog  # noqa: E402, F401

del sys.modules["rich"]
from agentd.worker.app import main  # noqa: E402

code = main()
sys.stdout.flush()
sys.stderr.flush()
# At once: threads of tools that hang would hold an ordinary exit.
os._exit(code)
