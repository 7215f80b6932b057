"""Discovery: small probes over a HostFs, in an explicit order."""

from agentd.probes.discovery import PROBES, discover, refresh

__all__ = ["PROBES", "discover", "refresh"]
