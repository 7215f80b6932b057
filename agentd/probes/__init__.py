"""Discovery: small probes over a HostFs, in an explicit order."""

from agentd.probes.discovery import PROBES, discover

__all__ = ["PROBES", "discover"]
