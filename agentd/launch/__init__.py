"""Starting bound processes: one protocol, a plain implementation."""

from agentd.launch.plain import PlainLauncher
from agentd.launch.protocol import ExitStatus, Launcher, LaunchSpec, Process

__all__ = ["ExitStatus", "LaunchSpec", "Launcher", "PlainLauncher", "Process"]
