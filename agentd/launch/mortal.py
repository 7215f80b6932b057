"""Children that die with agentd, however that ends."""

from __future__ import annotations

import shutil

import structlog

_log = structlog.get_logger(__name__)


def die_with_parent() -> tuple[str, ...]:
    """Return what goes before the command of a child that must not outlive its parent.

    The parent is the thread that starts it: prctl(2), PR_SET_PDEATHSIG.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        _log.warning("setpriv is not on PATH: processes may outlive a killed agentd")
        return ()
    return (setpriv, "--pdeathsig", "KILL")
