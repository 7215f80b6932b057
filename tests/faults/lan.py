"""A small network of network namespaces: one bridge, one veth pair a host, cut and delayed at will.

Names carry the number of the process that made them, so that what a dead run left behind
is known and removed at the next start. The bridge has an address of its own: the test
itself is on the network too. Needs root.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
from types import TracebackType

import psutil

_PREFIX = "cff"
_NETS = tuple(ipaddress.IPv4Network("198.18.0.0/15").subnets(new_prefix=24))
"""For tests between networks (RFC 2544); one of them is taken."""
_NOBODY = "02:00:00:00:00:01"
_PATIENCE_S = 20.0


class LanFailed(RuntimeError):
    """A command that changes the network was refused."""


def missing() -> str:
    """Return why no such network can be made here; '' when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "nsenter", "setpriv"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    try:
        with Lan() as lan:
            lan.add("try")
    except LanFailed as error:
        return f"network namespaces cannot be made: {error}"
    return ""


class Lan:
    """The network; use as a context manager. Methods block for some milliseconds."""

    def __init__(self) -> None:
        self._tag = f"{_PREFIX}{os.getpid()}"
        self._bridge = f"{self._tag}b"
        self._net = _NETS[0]
        self._hosts: dict[str, int] = {}
        self._cables: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Lan:
        _remove_leftovers()
        self._net = _free_net()
        try:
            _ip(
                f"link add {self._bridge} type bridge stp_state 0 forward_delay 0",
                f"addr add {self._net[1]}/24 dev {self._bridge}",
                f"link set {self._bridge} up",
            )
        except BaseException:  # whatever stops it, no link may stay
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove all links and namespaces, and kill what still runs in them. Idempotent."""
        for cable in self._cables.values():
            cable.kill()
            cable.wait()
        self._cables.clear()
        self._hosts.clear()
        _remove(os.getpid())

    def add(self, host: str) -> str:
        """Put a host onto the network; return its address."""
        number = len(self._hosts) + 2
        self._hosts[host] = number
        space, outer, address = self.namespace(host), self._outer(host), self.address(host)
        _ip(
            f"netns add {space}",
            f"link add {outer} type veth peer name eth0 netns {space}",
            f"link set {outer} master {self._bridge} up",
        )
        _ip(
            "link set lo up",
            f"addr add {address}/24 dev eth0",
            "link set eth0 up",
            namespace=space,
        )
        return address

    def namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def address(self, host: str) -> str:
        return str(self._net[self._hosts[host]])

    def inside(self, host: str) -> list[str]:
        """Return what makes a command run on `host`; the process stays the same one."""
        return ["nsenter", f"--net=/run/netns/{self.namespace(host)}", "--"]

    def cut(self, *hosts: str) -> None:
        """Take hosts off the network, as if their ports of the switch were off."""
        _ip(*(f"link set {self._outer(host)} down" for host in hosts))

    def mend(self, *hosts: str) -> None:
        _ip(*(f"link set {self._outer(host)} up" for host in hosts))

    def cut_one_way(self, source: str, *targets: str) -> None:
        """Lose what `source` sends to `targets`; what they send still comes through."""
        _ip(
            *(
                f"neigh replace {self.address(target)} lladdr {_NOBODY} dev eth0 nud permanent"
                for target in targets
            ),
            namespace=self.namespace(source),
        )

    def mend_one_way(self, source: str, *targets: str) -> None:
        _ip(
            *(f"neigh del {self.address(target)} dev eth0" for target in targets),
            namespace=self.namespace(source),
        )

    def delay(self, host: str, milliseconds: int) -> None:
        """Hold every packet from and to `host` back for so long, each way.

        By a process that stands in the cable (tests/faults/cable.py): not every kernel
        has the netem queue.
        """
        number = self._hosts[host]
        near, far = f"{self._tag}n{number}", f"{self._tag}f{number}"
        outer = self._outer(host)
        _ip(
            f"link add {near} type veth peer name {far}",
            f"link set {far} master {self._bridge} up",
            f"link set {near} up",
        )
        self._cables[host] = cable = start_cable(outer, near, milliseconds)
        assert cable.stdout is not None
        if not cable.stdout.readline():
            raise LanFailed(f"the cable of {host} ended with {cable.wait()}")
        _ip(f"link set {outer} nomaster")

    def undelay(self, host: str) -> None:
        _ip(f"link set {self._outer(host)} master {self._bridge}")
        cable = self._cables.pop(host)
        cable.kill()
        cable.wait()
        assert cable.stdout is not None
        cable.stdout.close()
        _ip(f"link del {self._tag}n{self._hosts[host]}")

    def _outer(self, host: str) -> str:
        return f"{self._tag}v{self._hosts[host]}"


def start_cable(one: str, other: str, milliseconds: int) -> subprocess.Popen[bytes]:
    """Start the process that passes frames between two links, late."""
    return subprocess.Popen(
        [
            *("setpriv", "--pdeathsig", "KILL"),
            *(sys.executable, "-m", "tests.faults.cable", one, other, str(milliseconds)),
        ],
        stdout=subprocess.PIPE,
    )


def _ip(*lines: str, namespace: str = "") -> None:
    command = ["ip", *(["-n", namespace] if namespace else []), "-batch", "-"]
    try:
        done = subprocess.run(
            command,
            input="\n".join(lines) + "\n",
            text=True,
            capture_output=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LanFailed(f"{'; '.join(lines)}: no end within {_PATIENCE_S} s") from error
    if done.returncode != 0:
        raise LanFailed(f"{'; '.join(lines)}: {done.stderr.strip()}")


def _shown(*arguments: str) -> list[dict[str, object]]:
    done = subprocess.run(
        ["ip", "-j", *arguments], text=True, capture_output=True, timeout=_PATIENCE_S, check=False
    )
    if done.returncode != 0:
        raise LanFailed(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    found = json.loads(done.stdout or "[]")
    assert isinstance(found, list)
    return [each for each in found if isinstance(each, dict)]


def _free_net() -> ipaddress.IPv4Network:
    """Return a network that no link of this machine has an address in."""
    text = json.dumps(_shown("addr"))
    start = os.getpid() % len(_NETS)
    for net in (*_NETS[start:], *_NETS[:start]):
        if f'"{str(net[0]).rsplit(".", 1)[0]}.' not in text:
            return net
    raise LanFailed("all of 198.18.0.0/15 is in use")


def _made_by(name: object) -> int | None:
    """Return the process that a link's or namespace's name carries, or None."""
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        return None
    digits = ""
    for letter in name.removeprefix(_PREFIX):
        if not letter.isdecimal():
            break
        digits += letter
    return int(digits) if digits else None


def _remove_leftovers() -> None:
    """Remove what dead runs left behind."""
    found = [*_shown("netns", "list"), *_shown("link")]
    makers = {_made_by(each.get("name") or each.get("ifname")) for each in found}
    for maker in makers - {None}:
        assert maker is not None
        if maker == os.getpid() or not psutil.pid_exists(maker):
            _remove(maker)


def _remove(maker: int) -> None:
    for each in _shown("netns", "list"):
        name = str(each.get("name"))
        if _made_by(name) != maker:
            continue
        for pid in _processes_in(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip(f"netns del {name}")
    # The other end of a pair goes with the namespace, which takes the kernel a moment.
    for each in _shown("link"):
        name = str(each.get("ifname"))
        if _made_by(name) == maker:
            with contextlib.suppress(LanFailed):
                _ip(f"link del {name}")


def _processes_in(namespace: str) -> list[int]:
    done = subprocess.run(
        ["ip", "netns", "pids", namespace],
        text=True,
        capture_output=True,
        timeout=_PATIENCE_S,
        check=False,
    )
    return [int(pid) for pid in done.stdout.split()]
