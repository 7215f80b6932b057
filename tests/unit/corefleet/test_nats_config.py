"""nats.conf: what is in it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from agentctl.main import main
from corefleet.errors import InvalidInput
from corefleet.identity import Identity
from corefleet.nats_config import Member, NatsServerPlan, parse_nodes, render

PLAN = NatsServerPlan(name="nats-1", listen="10.0.0.1:4222", store_dir="/data")
NODES = "n2 r1\nn1 r1  # the first\n\nn3\n"


def test_the_order_of_members_changes_nothing() -> None:
    members = parse_nodes(NODES)

    assert render(PLAN, members) == render(PLAN, reversed(members))


@pytest.mark.parametrize(
    ("text", "names"),
    [("a b c", "line 1"), ("n1\nn1", "each node once"), ("n.1", "line 1"), ("n1 r/1", "line 1")],
)
def test_a_wrong_list_is_refused(text: str, names: str) -> None:
    with pytest.raises(InvalidInput, match=names):
        parse_nodes(text)


@pytest.mark.parametrize("monitor", ["0.0.0.0:8222", "10.0.0.1:8222", "8222"])
def test_the_monitor_stays_on_the_machine(monitor: str) -> None:
    plan = NatsServerPlan(name="a", listen="10.0.0.1:4222", store_dir="/d", monitor=monitor)

    with pytest.raises(InvalidInput, match=r"^monitor: "):
        render(plan, [])


def test_a_role_without_business_on_nats_is_refused() -> None:
    with pytest.raises(InvalidInput, match="client/x"):
        render(PLAN, [Member(Identity("client", "x"))])


def test_the_command_prints_a_cluster(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text(NODES)
    words = ["nats-config", "nats-1", "--node-list", str(nodes), "--controld", "c1"]
    words += ["--cluster", "0.0.0.0:6222", "--route", "h2:6222", "--route", "h1:6222"]

    shown = CliRunner().invoke(main, words)

    assert shown.exit_code == 0
    assert 'routes: ["nats-route://h1:6222", "nats-route://h2:6222"]' in shown.stdout
    assert "n3.agentd.corefleet" in shown.stdout


def test_a_list_that_is_not_there_is_the_users_mistake(tmp_path: Path) -> None:
    words = ["nats-config", "nats-1", "--node-list", str(tmp_path / "none"), "--controld", "c1"]

    assert CliRunner().invoke(main, words).exit_code == 2
