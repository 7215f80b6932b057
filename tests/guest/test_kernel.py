"""What the node's rules say of Linux and systemd, seen on the real ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tools.guest.guest import Guest

MIB = 1 << 20
PAGE = 4096

# Prints how many pages of a mapping lie on which node, and the policy that put them there.
TOUCH = """
import mmap, sys
file = open(sys.argv[2], "rb") if len(sys.argv) > 2 else None
size = int(sys.argv[1])
memory = mmap.mmap(
    file.fileno() if file else -1, size, prot=mmap.PROT_READ | (0 if file else mmap.PROT_WRITE)
)
total = 0
for page in range(0, size, 4096):
    if file:
        total += memory[page]
    else:
        memory[page] = 1
lines = [line.split() for line in open("/proc/self/numa_maps")]
def pages(line):
    return {w.split("=")[0]: int(w.split("=")[1]) for w in line if w[0] == "N" and "=" in w}
line = max(lines, key=lambda line: sum(pages(line).values()) if (
    not file or any(w == "file=" + sys.argv[2] for w in line)) else -1)
print(line[1], *[f"{node}={count}" for node, count in sorted(pages(line).items())])
"""

# Burns CPU until a second of the wall has passed; prints the CPU time it was given.
BURN = """
import time
end = time.monotonic() + 2
while time.monotonic() < end:
    pass
print(time.process_time())
"""


@pytest.fixture(scope="module", autouse=True)
def programs(guest: Guest) -> None:
    guest.put("/opt/test/touch.py", TOUCH)
    guest.put("/opt/test/burn.py", BURN)


@contextmanager
def running(guest: Guest, unit: str, command: str, *properties: str) -> Iterator[str]:
    """A transient unit for the time of the block; gives the directory of its cgroup."""
    options = " ".join(f"-p {each}" for each in properties)
    guest.must(f"systemd-run --quiet --unit={unit} {options} {command}")
    try:
        yield "/sys/fs/cgroup" + guest.must(f"systemctl show -P ControlGroup {unit}")
    finally:
        guest.must(f"systemctl kill --signal=KILL {unit}; systemctl stop {unit}; "
                   f"systemctl reset-failed {unit} 2>/dev/null; true")  # fmt: skip


def applied(guest: Guest, unit: str) -> None:
    """Return when systemd has done what it had queued: it answers after its queues."""
    guest.must(f"systemctl show -P ActiveState {unit}")


def test_the_guest_has_one_cgroup_tree_of_version_2(guest: Guest) -> None:
    assert guest.must("stat -fc %T /sys/fs/cgroup") == "cgroup2fs"
    controllers = guest.read("/sys/fs/cgroup/cgroup.controllers").split()
    assert {"cpu", "cpuset", "memory", "io", "pids"} <= set(controllers)


@pytest.mark.parametrize("node", [0, 3])
def test_memory_of_a_process_that_numactl_binds_lies_on_its_node(guest: Guest, node: int) -> None:
    said = guest.must(
        f"numactl --physcpubind={node} --membind={node} python3 /opt/test/touch.py {16 * MIB}"
    )

    assert said == f"bind:{node} N{node}={16 * MIB // PAGE}"


def test_numactl_fails_when_the_cpuset_lacks_the_node(guest: Guest) -> None:
    result = guest.run(
        "systemd-run --quiet --wait --pipe -p AllowedMemoryNodes=0 numactl --membind=2 true"
    )

    assert result.code == 1


def test_memory_max_kills_what_takes_more(guest: Guest) -> None:
    result = guest.run(
        "systemd-run --quiet --wait --pipe --unit=eater -p MemoryMax=48M -p MemorySwapMax=0 "
        f"python3 /opt/test/touch.py {128 * MIB}"
    )

    assert result.code != 0
    assert guest.must("systemctl show -P Result eater") == "oom-kill"
    guest.must("systemctl reset-failed eater")


def test_a_cpu_quota_throttles(guest: Guest) -> None:
    said = guest.must(
        "systemd-run --quiet --wait --pipe -p CPUQuota=20% bash -c "
        "'python3 /opt/test/burn.py; cat /sys/fs/cgroup$(cut -d: -f3 /proc/self/cgroup)/cpu.stat'"
    )

    given_s, *rest = said.splitlines()
    throttled = re.search(r"nr_throttled (\d+)", "\n".join(rest))
    assert float(given_s) < 1.0  # of 2 s
    assert throttled is not None
    assert int(throttled[1]) > 0


def test_a_raw_write_to_cpu_max_is_undone_by_daemon_reload(guest: Guest) -> None:
    with running(guest, "quota", "sleep infinity", "CPUQuota=50%") as group:
        guest.must(f"echo '20000 100000' >{group}/cpu.max")
        assert guest.read(f"{group}/cpu.max") == "20000 100000"

        guest.must("systemctl daemon-reload")
        applied(guest, "quota")

        assert guest.read(f"{group}/cpu.max") == "50000 100000"


def test_a_property_that_systemd_set_outlives_daemon_reload(guest: Guest) -> None:
    with running(guest, "quota", "sleep infinity", "CPUQuota=50%") as group:
        guest.must("systemctl set-property --runtime quota CPUQuota=20%")
        guest.must("systemctl daemon-reload")
        applied(guest, "quota")

        assert guest.read(f"{group}/cpu.max") == "20000 100000"


@pytest.mark.parametrize(
    ("allowed", "policy", "lies_on"), [("0-3", "bind:2", 2), ("0", "default", 0)]
)
def test_a_bound_tmpfs_is_filled_on_its_node_only_if_the_filler_may_use_it(
    guest: Guest, allowed: str, policy: str, lies_on: int
) -> None:
    """Otherwise the file is made without the mount's policy, and nothing says so."""
    guest.must("mkdir -p /opt/test/replica")
    guest.must("mount -t tmpfs -o mpol=bind:2,size=64m replica /opt/test/replica")
    try:
        guest.must(
            f"systemd-run --quiet --wait -p AllowedMemoryNodes={allowed} "
            "dd if=/dev/zero of=/opt/test/replica/model bs=1M count=16"
        )
        said = guest.must(f"python3 /opt/test/touch.py {16 * MIB} /opt/test/replica/model")
    finally:
        guest.must("umount /opt/test/replica")

    assert said == f"{policy} N{lies_on}={16 * MIB // PAGE}"


def test_a_process_bound_to_a_cpu_goes_on_elsewhere_when_the_cpu_goes_offline(
    guest: Guest,
) -> None:
    online = "/sys/devices/system/cpu/cpu3/online"
    work = "sh -c 'echo bound; while :; do :; done'"
    with running(guest, "bound", f"numactl --physcpubind=3 --membind=3 {work}"):
        guest.wait_for_journal("bound", "^bound$")
        allowed = "grep Cpus_allowed_list /proc/$(systemctl show -P MainPID bound)/status"
        assert guest.must(allowed).split()[-1] == "3"
        guest.must(f"echo 0 >{online}")
        try:
            assert guest.must("systemctl is-active bound") == "active"
            assert guest.must(allowed).split()[-1].startswith("0-")
            assert guest.read("/sys/devices/system/node/node3/cpulist") == ""
        finally:
            guest.must(f"echo 1 >{online}")
