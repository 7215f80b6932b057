"""`python -m agentd.engine`: see app."""

import sys

from agentd.engine.app import main

sys.exit(main())
