"""Whether a process is bound as it was asked to be, read from the kernel."""

from __future__ import annotations

from agentd.core.cpulist import format_list, parse_list
from agentd.hostfs import HostFs
from corefleet.errors import InvalidInput


def wrong_binding(
    host: HostFs, pid: int, cpus: tuple[int, ...], nodes: tuple[int, ...], memory: bool
) -> str | None:
    """Return what is wrong with the binding of `pid`, None if nothing is.

    `memory` says whether its memory must be bound to `nodes`: then every mapping that the
    kernel shows has that policy, or its cpuset leaves it no other node.
    """
    text = host.status_field(pid, "Cpus_allowed_list")
    if text is None:
        return "it is gone"
    try:
        allowed = parse_list(text, "Cpus_allowed_list")
    except InvalidInput as error:
        return str(error)
    if allowed != tuple(sorted(cpus)):
        return f"it may run on CPUs {text}; expected {format_list(cpus)}"
    return _wrong_memory(host, pid, format_list(nodes)) if memory else None


def _wrong_memory(host: HostFs, pid: int, nodes: str) -> str | None:
    if host.status_field(pid, "Mems_allowed_list") == nodes:
        return None
    policies = host.memory_policies(pid)
    if policies is None:
        return "its memory policy cannot be read"
    other = [policy for policy in policies if policy.replace("=static", "") != f"bind:{nodes}"]
    if other:
        return f"its memory policy is {other[0]}; expected bind:{nodes}"
    return None
