"""A fleet of guests that ansible installs: a mirror of archives, an inventory, plays."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tools.guest.guest import Guest
from tools.guest.layout import HOST_ADDRESS, LOOPBACK
from tools.guest.steps import Steps
from tools.package import sha256

ANSIBLE = Path(__file__).parents[2] / "ansible"
GUEST_ADDRESS = "10.0.2.15"
"""Of every guest, each in a network of its own."""

_RECAP = re.compile(r"^(\S+)\s+: ok=(\d+)\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.M)
_SHOWN = 6000
_SLOW_UNITS = ("agentd", "controld", "corefleet-etcd", "corefleet-nats")

# An emulated host is ten times slower than a real one, and the machine under it is busy.
_PATIENCE: dict[str, Any] = {
    "controld_lease_ttl_s": 20,
    "controld_timeout_s": 20,
    "controld_tables": {
        "liveness": {
            "beat_interval_s": 1.0,
            "suspect_after_s": 15.0,
            "lost_after_s": 30.0,
            "probe_timeout_s": 10.0,
        },
        "overload": {"cpu_limit": 1.0, "loop_lag_limit_s": 10.0},
    },
    "controld_streams": 1,
    # Each is owned, marked and followed on its own.
    "controld_shards": 8,
    "controld_ready_retries": 60,
    "agentd_timeout_s": 20,
    "agentd_beat_interval_s": 1.0,
    "agentd_tables": {
        "bandwidth": {"interval_s": 2.0, "canary_every_s": 10.0},
        "plan": {"worker_memory_floor_bytes": 32 << 20},
    },
    "etcd_heartbeat_ms": 500,
    "etcd_election_ms": 5000,
    "nats_max_store": "512MB",
    "smoke_deadline_s": 300,
}


@dataclass(frozen=True, slots=True)
class Played:
    """What a playbook's run said, and its counts by host."""

    code: int
    out: str
    changed: Mapping[str, int]
    failed: Mapping[str, int]


class Rollout:
    """Runs playbooks against guests. Methods block."""

    def __init__(self, directory: Path, archives: Path, mirror: str, steps: Steps) -> None:
        self._directory = directory
        self._archives = archives
        self._mirror = mirror
        self._steps = steps

    def write_inventory(self, guests: Mapping[str, Guest], version: str) -> None:
        """All guests are nodes, each in a rack of its own; the first is the control plane, too."""
        first = next(iter(guests))
        identity = next(iter(guests.values())).ssh_command()
        key = identity[identity.index("-i") + 1]
        hosts = {
            name: {"ansible_port": guest.ssh_port, "corefleet_address": GUEST_ADDRESS}
            for name, guest in guests.items()
        }
        archive = next(self._archives.glob(f"corefleet-{version}-*.tar.gz"))
        everywhere = {
            "ansible_host": LOOPBACK,
            "ansible_user": "root",
            "ansible_ssh_private_key_file": key,
            "ansible_ssh_common_args": "-F /dev/null -o StrictHostKeyChecking=no "
            "-o UserKnownHostsFile=/dev/null -o IdentitiesOnly=yes -o ConnectTimeout=60",
            "corefleet_version": version,
            "corefleet_artifacts": self._mirror,
            "corefleet_sha256": {"x86_64": sha256(archive)},
            "corefleet_pki_dir": str(self._directory / "pki"),
            "corefleet_agentctl": str(Path(sys.executable).with_name("agentctl")),
            "pki_hosts": [HOST_ADDRESS],
            **_PATIENCE,
        }
        racks = {
            f"rack_{number}": {"hosts": {name: {}}, "vars": {"corefleet_rack": f"rack-{number}"}}
            for number, name in enumerate(guests, 1)
        }
        children: dict[str, object] = {
            role: {"hosts": {first: {}}} for role in ("etcd", "nats", "controld")
        }
        inventory = {
            "all": {
                "hosts": hosts,
                "vars": everywhere,
                "children": {**children, "agentd": {"children": racks}},
            }
        }
        (self._directory / "hosts.json").write_text(json.dumps(inventory, indent=1))

    def play(self, playbook: str, *arguments: str, limit_s: float) -> Played:
        """Run a playbook to its end."""
        log = self._directory / f"{playbook}.log"
        command = [
            str(Path(sys.executable).with_name("ansible-playbook")),
            *("-i", str(self._directory / "hosts.json")),
            *(str(ANSIBLE / "playbooks" / f"{playbook}.yml"), *arguments),
        ]
        environment = {
            **os.environ,
            "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
            "ANSIBLE_HOME": str(self._directory / "home"),
            # Short: ssh's control sockets lie below it, and their paths have a limit.
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(self._directory / "c"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_SSH_TIMEOUT": "60",
        }
        with self._steps.step(f"{playbook} {' '.join(arguments)}".strip()), log.open("wb") as out:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env=environment, timeout=limit_s, check=False,
            ).returncode  # fmt: skip
        text = log.read_text("utf-8", "replace")
        counts = {found[1]: found for found in _RECAP.finditer(text)}
        return Played(
            code,
            text,
            {host: int(found[3]) for host, found in counts.items()},
            {host: int(found[4]) + int(found[5]) for host, found in counts.items()},
        )

    def must(self, playbook: str, *arguments: str, limit_s: float) -> Played:
        """Run a playbook that has to succeed."""
        played = self.play(playbook, *arguments, limit_s=limit_s)
        assert played.code == 0, played.out[-_SHOWN:]
        return played


def be_patient(guest: Guest) -> None:
    """Let systemd wait longer for programs that are emulated."""
    for unit in _SLOW_UNITS:
        guest.put(
            f"/etc/systemd/system/{unit}.service.d/emulated.conf",
            "[Service]\nTimeoutStartSec=15min\nWatchdogSec=0\n",
        )


@contextmanager
def mirror(directory: Path) -> Iterator[str]:
    """Serve a directory's files by HTTP, as a rack's mirror does; its address for guests."""
    handler = partial(_Quiet, directory=str(directory))
    with ThreadingHTTPServer((LOOPBACK, 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="mirror")
        thread.start()
        try:
            yield f"http://{HOST_ADDRESS}:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""
