"""Inventories and variables of `ansible/`, read as ansible reads them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from agentd.settings import check_config as check_agentd
from corefleet.config import AgentdConfig, parse

ANSIBLE = Path(__file__).parents[3] / "ansible"
FAMILIES = ("debian", "redhat", "openeuler")


def load(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def roles() -> list[str]:
    return sorted(path.name for path in (ANSIBLE / "roles").iterdir())


def reference() -> dict[str, Any]:
    """Return what the reference plan's program prints."""
    script = ANSIBLE / "inventories/reference/inventory.py"
    said = subprocess.run([sys.executable, script], capture_output=True, check=True).stdout
    plan: dict[str, Any] = json.loads(said)
    return plan


def test_the_reference_inventory_has_4096_nodes_in_103_racks_and_100_control_nodes() -> None:
    plan = reference()
    racks = [plan[name] for name in plan["agentd"]["children"]]
    assert len(racks) == 103
    assert sum(len(rack["hosts"]) for rack in racks) == 4096
    assert {len(rack["hosts"]) for rack in racks[:-1]} == {40}
    assert len({rack["vars"]["corefleet_rack"] for rack in racks}) == 103
    assert len(plan["controld"]["hosts"]) == 100
    assert len(plan["etcd"]["hosts"]) <= 7
    addresses = [host["corefleet_address"] for host in plan["_meta"]["hostvars"].values()]
    assert len(set(addresses)) == len(addresses) == 4196


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_of_distributions_names_packages_and_boot_options(family: str) -> None:
    known = load(ANSIBLE / f"roles/preflight/vars/{family}.yml")
    assert set(known["preflight_packages"]) == {"numactl", "tar", "systemd-sysusers"}
    assert "systemd.unified_cgroup_hierarchy=1" in known["preflight_boot_options"]
    assert "psi=1" in known["preflight_boot_options"]
    assert known["preflight_boot_options_command"]


@pytest.mark.parametrize("role", roles())
def test_every_default_of_a_role_is_the_default_of_its_argument(role: str) -> None:
    defaults = ANSIBLE / f"roles/{role}/defaults/main.yml"
    options = load(ANSIBLE / f"roles/{role}/meta/argument_specs.yml")["argument_specs"]["main"][
        "options"
    ]
    for name, value in (load(defaults) or {}).items():
        assert options[name]["default"] == value, name
    for name, option in options.items():
        assert option["type"], name
        assert option["description"], name


def test_no_version_of_anything_is_the_latest() -> None:
    for file in sorted(ANSIBLE.rglob("*.yml")):
        text = re.sub(r"never `latest`", "", file.read_text())
        assert "latest" not in text, file


@pytest.mark.parametrize("tls", [True, False])
def test_the_template_of_a_node_is_toml_with_its_labels_and_tables(tls: bool) -> None:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ANSIBLE / "roles/agentd/templates"),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["to_json"] = json.dumps
    environment.filters["regex_replace"] = lambda text, pattern, new: re.sub(
        pattern, new, text, count=1
    )
    values = load(ANSIBLE / "roles/agentd/defaults/main.yml") | {
        "inventory_hostname": "node-0001",
        "ansible_managed": "by ansible",
        "corefleet_address": "10.0.1.1",
        "corefleet_rack": "rack-01",
        "corefleet_tls": tls,
        "corefleet_nats_servers": ["10.0.0.11:4222", "10.0.0.12:4222"],
        "agentd_labels": {"disk": "nvme"},
        "agentd_tables": {"plan": {"worker_memory_floor_bytes": 1 << 25}},
    }
    text = environment.get_template("agentd.toml.j2").render(values)
    raw = tomllib.loads(text)
    assert raw["nats"]["servers"] == ["nats://10.0.0.11:4222", "nats://10.0.0.12:4222"]
    assert ("tls" in raw["nats"]) is tls
    assert raw["labels"] == {"disk": "nvme"}
    if tls:
        config = parse(text, AgentdConfig, "agentd.toml")
        check_agentd(config, "agentd.toml")
        assert config.plan.worker_memory_floor_bytes == 1 << 25
