"""Installs the project in a guest. The saved states are kept by this module's text.

pip in a guest is emulated: making a virtual environment with pip alone took 160 s, and
copying its files minutes on a busy host. So the host's pip lays them out on a disk, which
the guest mounts on /opt/corefleet.
"""

from __future__ import annotations

from pathlib import Path

from tools.guest import payload
from tools.guest.errors import GuestError
from tools.guest.guest import BIN, Guest
from tools.guest.image import PYTHON
from tools.guest.steps import Steps

WHEELS = "/opt/corefleet/wheels"
"""Where a prepared guest has the wheels of all dependencies, for tests of installing."""

_APP_LIMIT_S = 300.0
_SETTLE_LIMIT_S = 300.0


def home(version: str) -> str:
    """Return where a version lies in a guest."""
    return f"/opt/corefleet/{version}"


def install_dependencies(guest: Guest) -> None:
    """Mount the payload, which has all dependencies, on /opt/corefleet."""
    guest.must("mkdir -p /opt/corefleet && mount -o noatime /dev/vdb /opt/corefleet")
    settle(guest)


def install_project(guest: Guest, site: Path, steps: Steps) -> None:
    """Install the checkout, laid out in `site`, and its commands."""
    version = payload.version()
    with steps.step("copy the project"):
        guest.put_tree(site, f"{home(version)}/lib/python{PYTHON}/site-packages")
        for name, target in payload.commands().items():
            module, _, function = target.partition(":")
            guest.put(
                f"{home(version)}/bin/{name}",
                f"#!{home(version)}/bin/python\nimport sys\nfrom {module} import {function}\n"
                f"sys.exit({function}())\n",
                0o755,
            )
    # Loads into the page cache what every test is going to import. Whether that works is for
    # the tests to say.
    with steps.step("first run of agentd"):
        guest.run(f"{BIN}/agentd --help", _APP_LIMIT_S)
    settle(guest)


def settle(guest: Guest) -> None:
    """Leave nothing half done in the state that is saved."""
    state = guest.run("systemctl is-system-running --wait", _SETTLE_LIMIT_S).out.strip()
    if state != "running":
        failed = guest.run("systemctl --failed --no-legend").out
        raise GuestError(f"the guest is {state} after its start: {failed}")
    guest.must("sync")
