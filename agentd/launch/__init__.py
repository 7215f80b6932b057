"""Starting bound processes: one protocol, two implementations."""

from agentd.launch.plain import PlainLauncher
from agentd.launch.properties import Settings as SystemdSettings
from agentd.launch.protocol import ExitStatus, Launcher, LaunchSpec, Process
from agentd.launch.systemd import SystemdLauncher
from agentd.launch.units import Deadlines

__all__ = [
    "Deadlines",
    "ExitStatus",
    "LaunchSpec",
    "Launcher",
    "PlainLauncher",
    "Process",
    "SystemdLauncher",
    "SystemdSettings",
]
