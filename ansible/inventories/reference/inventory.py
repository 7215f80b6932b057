#!/usr/bin/env python3
"""The reference plan as an inventory: 4096 nodes of 40 a rack, 103 racks, 100 control nodes.

An example of an inventory that a program makes. 5 of the control nodes are members of etcd,
64 are servers of NATS.
"""

from __future__ import annotations

import json
import sys
from typing import Any

NODES, NODES_OF_RACK = 4096, 40
CONTROL_NODES, ETCD_MEMBERS, NATS_SERVERS = 100, 5, 64


def control_address(number: int) -> str:
    """Return the address of a control node, counted from 1."""
    return f"10.0.0.{number}"


def node_address(number: int) -> str:
    """Return the address of a node, counted from 0: a network for each rack."""
    rack, place = divmod(number, NODES_OF_RACK)
    return f"10.1.{rack}.{place + 1}"


def inventory() -> dict[str, Any]:
    """Return the inventory as ansible's script protocol has it."""
    controls = [f"control-{number:03}" for number in range(1, CONTROL_NODES + 1)]
    hostvars = {
        name: {"corefleet_address": control_address(number)}
        for number, name in enumerate(controls, 1)
    }
    racks: dict[str, Any] = {}
    for number in range(NODES):
        node, rack = f"node-{number + 1:04}", number // NODES_OF_RACK + 1
        hostvars[node] = {"corefleet_address": node_address(number)}
        group = racks.setdefault(
            f"rack_{rack:03}", {"hosts": [], "vars": {"corefleet_rack": f"rack-{rack:03}"}}
        )
        group["hosts"].append(node)
    return {
        "_meta": {"hostvars": hostvars},
        "etcd": {"hosts": controls[:ETCD_MEMBERS]},
        "nats": {"hosts": controls[-NATS_SERVERS:]},
        "controld": {"hosts": controls},
        "agentd": {"children": list(racks)},
        **racks,
    }


if __name__ == "__main__":
    json.dump(inventory(), sys.stdout, indent=1)
