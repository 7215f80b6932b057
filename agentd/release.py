"""Undoes what outlives agentd: for uninstalling a node."""

from __future__ import annotations

from pathlib import Path

import structlog

from agentd.bandwidth.resctrl_files import PREFIX, ROOT
from agentd.hostfs import HostFs
from agentd.launch import SystemdLauncher, SystemdSettings
from agentd.launch.bus import Systemd
from agentd.replica_mounts import MOUNT_DESCRIPTION
from corefleet.errors import Incompatible, LaunchFailed

_SLICE = "corefleet.slice"
_STOP_S = 60.0

_log = structlog.get_logger(__name__)


async def release(host: HostFs, run_dir: Path = Path("/run/corefleet")) -> list[str]:
    """End what runs in our slices, unmount models, free the CPUs, remove resctrl's groups.

    Returns one line for each thing that is left. What is not there is no matter.
    """
    left = []
    settings = SystemdSettings(node="", cpus={}, batch_cpus={})
    launcher: SystemdLauncher | None = None
    try:
        launcher = await SystemdLauncher.find(host, run_dir / "kept" / "units", settings)
    except Incompatible as error:
        _log.info("Nothing to release of systemd", reason=str(error))
    if launcher is not None:
        try:
            left += await _stop(launcher.systemd)
            await launcher.release_system()
        except LaunchFailed as error:
            left.append(str(error))
        finally:
            await launcher.close()
    return left + _remove_groups(host)


async def _stop(systemd: Systemd) -> list[str]:
    left = []
    listed = await systemd.manager("ListUnitsByPatterns", "asas", [], [_SLICE, "*.mount"])
    for unit, description, *_ in listed[0]:
        if unit != _SLICE and not description.startswith(MOUNT_DESCRIPTION):
            continue
        result = await systemd.stop(unit, _STOP_S)
        if result != "done":
            left.append(f"{unit}: not stopped: {result}")
    return left


def _remove_groups(host: HostFs) -> list[str]:
    left = []
    for name in host.names(ROOT):
        if name.startswith(PREFIX):
            try:
                host.remove_directory(f"{ROOT}/{name}")
            except OSError as error:
                left.append(f"resctrl group {name}: {error.strerror}")
    return left
