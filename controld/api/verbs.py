"""What each RPC is called in grants and in the audit log."""

from __future__ import annotations

from dataclasses import dataclass

from controld.core.grants import Verb


@dataclass(frozen=True, slots=True)
class Rule:
    """How a call of one RPC is guarded."""

    verb: Verb | None
    """None: everybody who is known may call it."""
    mutates: bool = False
    """Each call is written to the audit log, not only one that is denied."""
    itemised: bool = False
    """It carries many submissions, which are written down as they are decided."""


_SERVICES: dict[str, dict[str, Rule]] = {
    "corefleet.v1.Tasks": {
        "Submit": Rule("submit", mutates=True),
        "SubmitStream": Rule("submit", itemised=True),
        "Get": Rule("read"),
        "Watch": Rule("read"),
        "Trace": Rule("read"),
        "Cancel": Rule("cancel", mutates=True),
        "List": Rule("list"),
    },
    "corefleet.v1.Fleet": {
        "ListNodes": Rule("nodes-read"),
        "ListPools": Rule("pools-read"),
        "ApplyPool": Rule("pools-write", mutates=True),
        "Explain": Rule("explain"),
        "ListControlds": Rule("fleet-read"),
        "Overview": Rule("fleet-read"),
        "DrainNode": Rule("drain", mutates=True),
        "UndrainNode": Rule("drain", mutates=True),
        "WatchDrain": Rule("nodes-read"),
    },
    "corefleet.v1.Access": {"WhoAmI": Rule(None)},
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Rule("reflect")},
}
RULES = {
    f"/{service}/{method}": rule
    for service, methods in _SERVICES.items()
    for method, rule in methods.items()
}
"""By the path of the RPC. What is not here nobody may call."""
OPEN = ("/grpc.health.v1.Health/",)
"""Services that anybody may ask: peers and load balancers look whether a port answers."""
