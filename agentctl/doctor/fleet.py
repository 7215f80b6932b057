"""Checks of a fleet as a client sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from agentctl.doctor.finding import Finding, error, ok, warning
from corefleet.client import Client
from corefleet.errors import CorefleetError
from corefleet.program import version
from corefleet.rpc import fleet_pb2

_NAMED = 5
_SKEW_S = 2.0


async def address(name: str, client: Client) -> Finding:
    """Whether the controld at an address answers by itself; `client` knows no other."""
    check = f"controld {name}"
    try:
        living = await client.controlds()
    except CorefleetError as failure:
        return error(
            check,
            str(failure),
            "see that it runs (`journalctl -u controld`) and that this host may reach it",
        )
    return ok(check, f"answers, knows {len(living)} controlds")


def controlds(living: Sequence[fleet_pb2.Controld], shards: int | None = None) -> list[Finding]:
    """Whether all shards have an owner, and more than one controld lives."""
    owned = Counter(shard for each in living for shard in each.shards)
    twice = sorted(shard for shard, owners in owned.items() if owners > 1)
    highest = max(owned, default=-1) + 1 if shards is None else shards
    without = sorted(set(range(highest)) - owned.keys())
    found = []
    if len(living) < 2:
        found.append(
            warning(
                "controlds",
                f"{len(living)} alive",
                "start another: a single one is down while it is restarted",
            )
        )
    else:
        found.append(ok("controlds", f"{len(living)} alive"))
    if without or not owned:
        found.append(
            error(
                "shards",
                f"{len(without) or 'all'} without an owner, e.g. {without[:_NAMED]}",
                "if it lasts for more than some seconds see whether controlds reach etcd and NATS",
            )
        )
    elif twice:
        found.append(
            warning("shards", f"on the move: {twice[:_NAMED]}", "look again in some seconds")
        )
    else:
        found.append(ok("shards", f"all {len(owned)} owned"))
    return found


def nodes(known: Sequence[fleet_pb2.Node]) -> list[Finding]:
    """Which nodes are lost, cut off, drained, or of another version."""
    if not known:
        return [error("nodes", "none ever registered", "start agentd somewhere, see its journal")]
    found = []
    for state, do in (
        ("lost", "see whether the host lives; `journalctl -u agentd -u corefleet-heartbeat` there"),
        ("cut", "it lives but does not reach NATS: see its network and nats.servers"),
        ("held", "its agentd is away while its heartbeat goes on: see `journalctl -u agentd`"),
    ):
        names = sorted(each.node for each in known if each.state == state)
        if names:
            found.append(warning("nodes", f"{len(names)} {state}: {_some(names)}", do))
    drained = sorted(each.node for each in known if each.HasField("drain"))
    if drained:
        found.append(
            warning(
                "nodes",
                f"{len(drained)} draining: {_some(drained)}",
                "`agentctl undrain NODE` when the reason that `agentctl nodes` shows is gone",
            )
        )
    odd = sorted(each.node for each in known if each.version and each.version != version())
    if odd:
        found.append(
            warning(
                "versions",
                f"{len(odd)} nodes are not of this agentctl's version {version()}: {_some(odd)}",
                "finish the upgrade; one version apart works meanwhile",
            )
        )
    ready = sum(each.state == "ready" for each in known)
    if not ready:
        found.append(error("nodes", f"none of {len(known)} is ready", "see the lines above"))
    return found or [ok("nodes", f"all {ready} ready")]


def places(overview: fleet_pb2.OverviewReply, pools: Sequence[str]) -> list[Finding]:
    """Which pools have no place on any node, and which have none left."""
    total = {each.pool: (each.slots_used, each.slots_total) for each in overview.nodes.pools}
    found = []
    for pool in sorted(pools):
        used, slots = total.get(pool, (0, 0))
        if not slots:
            found.append(
                error(
                    f"pool {pool}",
                    "no node has a place for it: its tasks wait for ever",
                    "compare its labels, arch, memory and model with `agentctl node show`",
                )
            )
        elif used >= slots:
            found.append(warning(f"pool {pool}", f"all {slots} places taken", "add nodes or slots"))
        else:
            found.append(ok(f"pool {pool}", f"{used} of {slots} places taken"))
    return found


def clocks(answered_ms: int, before_ms: int, after_ms: int) -> Finding:
    """Whether a controld's clock, read between two of ours, is near ours."""
    off_s = max(before_ms - answered_ms, answered_ms - after_ms, 0) / 1000
    if off_s > _SKEW_S:
        return warning(
            "clock", f"controld's clock is {off_s:.1f} s off ours", "synchronise both clocks"
        )
    return ok("clock", "controld's clock agrees with ours")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
