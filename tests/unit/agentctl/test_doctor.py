"""What the doctor makes of what it is told, and of hosts that answer in all kinds of ways."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentctl.doctor import fleet, host
from agentctl.doctor.finding import Finding, Level, error, ok, skipped, warning, worst
from corefleet.program import version
from corefleet.rpc import fleet_pb2


def levels(findings: Sequence[Finding]) -> dict[str, Level]:
    return {each.check: each.level for each in findings}


def member(name: str, shards: Sequence[int]) -> fleet_pb2.Controld:
    return fleet_pb2.Controld(controld=name, shards=shards)


def node(name: str, state: str = "ready", **more: object) -> fleet_pb2.Node:
    return fleet_pb2.Node(node=name, state=state, version=version(), **more)  # type: ignore[arg-type]


def overview(**pools: tuple[int, int]) -> fleet_pb2.OverviewReply:
    places = [
        fleet_pb2.PoolPlaces(pool=name, slots_used=used, slots_total=total)
        for name, (used, total) in pools.items()
    ]
    return fleet_pb2.OverviewReply(nodes=fleet_pb2.NodesOverview(pools=places))


@pytest.mark.parametrize("level", ["warning", "error"])
def test_what_is_wrong_says_what_to_do(level: Level) -> None:
    with pytest.raises(ValueError, match="to do"):
        Finding(check="it", level=level, what="bad")


def test_the_gravest_finding_counts() -> None:
    found = [ok("a", "x"), skipped("b", "x"), warning("c", "x", "y")]
    assert worst([]) == "ok"
    assert worst(found) == "warning"
    assert worst([error("d", "x", "y"), *found]) == "error"


def test_a_fleet_that_is_well_has_nothing_to_do() -> None:
    found = [
        *fleet.controlds([member("c1", [0, 1]), member("c2", [2, 3])]),
        *fleet.nodes([node("n1"), node("n2")]),
        *fleet.places(overview(p=(1, 4)), ["p"]),
        fleet.clocks(1500, 1000, 2000),
    ]
    assert set(levels(found).values()) == {"ok"}


def test_shards_without_an_owner_and_a_lonely_controld_are_named() -> None:
    found = fleet.controlds([member("c1", [0, 1, 3])])
    assert levels(found) == {"controlds": "warning", "shards": "error"}
    assert "[2]" in found[-1].what
    assert levels(fleet.controlds([member("c1", []), member("c2", [])]))["shards"] == "error"


def test_a_shard_with_two_owners_is_on_the_move() -> None:
    found = fleet.controlds([member("c1", [0, 1]), member("c2", [1])])
    assert levels(found)["shards"] == "warning"


@pytest.mark.parametrize("state", ["lost", "cut", "held"])
def test_nodes_in_trouble_are_named_with_what_to_do(state: str) -> None:
    found = fleet.nodes([node("n1", state), *(node(f"m{number}") for number in range(8))])
    assert [(each.level, each.what) for each in found] == [("warning", f"1 {state}: n1")]


def test_a_long_list_of_nodes_is_cut() -> None:
    (lost, none) = fleet.nodes([node(f"n{number}", "lost") for number in range(9)])
    assert lost.what == "9 lost: n0, n1, n2, n3, n4 and 4 more"
    assert none.level == "error"


def test_drains_and_other_versions_are_told() -> None:
    drained = node("n1", drain=fleet_pb2.Drain(node="n1", reason="disk"))
    old = fleet_pb2.Node(node="n2", state="ready", version="0.0.1")
    assert levels(fleet.nodes([drained, old])) == {"nodes": "warning", "versions": "warning"}


def test_no_node_at_all_is_wrong() -> None:
    assert levels(fleet.nodes([])) == {"nodes": "error"}


def test_a_pool_without_a_place_is_wrong_and_a_full_one_a_warning() -> None:
    found = fleet.places(overview(full=(4, 4), free=(1, 4)), ["free", "full", "homeless"])
    assert levels(found) == {"pool free": "ok", "pool full": "warning", "pool homeless": "error"}


@pytest.mark.parametrize(("at_ms", "level"), [(7000, "ok"), (12000, "ok"), (12100, "warning")])
def test_a_clock_may_be_two_seconds_off(at_ms: int, level: Level) -> None:
    assert fleet.clocks(at_ms, 9000, 10000).level == level


async def test_a_program_of_the_system_is_asked_or_missed() -> None:
    assert await host.ask("echo", "yes") == (0, "yes")
    assert await host.ask("no-such-program-here") == (127, "no-such-program-here is not installed")
    code, said = await host.ask("sh", "-c", "echo no; exit 3")
    assert (code, said) == (3, "no")


async def test_a_program_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_ASK_S", 0.05)
    code, said = await host.ask("tail", "-f", "/dev/null")
    assert code == 124
    assert "did not end" in said


@pytest.mark.parametrize(
    ("answer", "check", "level"),
    [
        ((0, "yes"), host.clock, "ok"),
        ((0, "no"), host.clock, "warning"),
        ((127, "not there"), host.clock, "skipped"),
        ((0, "systemd 252 (252.1)\n+PAM"), host.systemd, "ok"),
        ((0, "systemd 248 (248)"), host.systemd, "error"),
        ((127, "not there"), host.systemd, "warning"),
    ],
)
async def test_what_the_system_says_is_judged(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, str], check: object, level: Level
) -> None:
    async def said(*_: str) -> tuple[int, str]:
        return answer

    monkeypatch.setattr(host, "ask", said)
    assert (await check()).level == level  # type: ignore[operator]


@pytest.mark.parametrize(
    ("groups", "hybrid", "level"), [(2, False, "ok"), (2, True, "error"), (1, False, "error")]
)
def test_only_control_groups_of_version_2_alone_are_right(
    groups: int, hybrid: bool, level: Level
) -> None:
    assert host.cgroups(groups, hybrid).level == level


async def test_a_unit_that_does_not_run_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    async def said(*command: str) -> tuple[int, str]:
        return (3, "failed") if command[-1] == "agentd" else (0, "active")

    monkeypatch.setattr(host, "ask", said)
    assert (await host.unit("agentd")).level == "error"
    assert (await host.unit("corefleet-heartbeat")).level == "ok"


@pytest.mark.parametrize(
    ("free", "total", "level"),
    [(50 << 30, 100 << 30, "ok"), (9 << 30, 100 << 30, "warning"), (1 << 30, 100 << 30, "error")],
)
async def test_room_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, total: int, level: Level
) -> None:
    used = SimpleNamespace(free=free, total=total)
    monkeypatch.setattr("psutil.disk_usage", lambda path: used)
    assert (await host.disk("disk", tmp_path / "later" / "on")).level == level
