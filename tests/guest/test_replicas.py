"""Model replicas on real NUMA nodes, mounted and filled by a real systemd: node rule 2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from agentd.filler.record import Exit, Verified, verified_path
from agentd.replica_mounts import mount_unit_name
from tests.guest.replica_node import Order, Told
from tools.guest.guest import BIN, Guest

pytestmark = pytest.mark.timeout(120, func_only=True)

_MIB = 1 << 20
_PAGE = 4096
_PROGRAM = "/opt/test/replica_node.py"
_MODELS = "/var/lib/models"
_RUN_LIMIT_S = 90.0
_LARGE = 48 * _MIB
_SMALL = 4 * _MIB
_FILLED = (1, 3)
_REFUSED = 2
"""The domain that gets no replica, whatever is tried."""

# Prints on which nodes a file's pages lie, as a process sees them that is bound to none.
_PAGES = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
assert len(memory[::4096])
for line in open("/proc/self/numa_maps"):
    if "file=" + sys.argv[1] in line.split():
        print(*(word for word in line.split() if word[0] == "N" and "=" in word))
"""


@pytest.fixture(scope="module", autouse=True)
def programs(guest: Guest) -> None:
    guest.put(_PROGRAM, (Path(__file__).parent / "replica_node.py").read_text())
    guest.put("/opt/test/pages.py", _PAGES)
    guest.must(f"mkdir -p {_MODELS}")


def model(guest: Guest, name: str, size: int, *domains: int) -> Order:
    """Make a file of random bytes and return the order for it."""
    path = f"{_MODELS}/{name}.gguf"
    digest = guest.must(f"head -c {size} /dev/urandom >{path} && sha256sum {path}").split()[0]
    return Order(name, Path(path), size, digest, domains)


def run(guest: Guest, *orders: Order) -> dict[str, Told]:
    """Carry out orders in the guest, by a program of its own; return the answers by model."""
    guest.put("/opt/test/orders.json", msgspec.json.encode(orders, enc_hook=str))
    said = guest.must(f"cd / && {BIN}/python {_PROGRAM} /opt/test/orders.json", _RUN_LIMIT_S)
    return msgspec.json.decode(said.splitlines()[-1], type=dict[str, Told])


def remains(guest: Guest, target: str) -> str:
    """Return the files beside a replica that take room."""
    return guest.must(f"find {Path(target).parent} -type f -size +0 | sort")


def identity(guest: Guest, told: Told) -> str:
    """Return what would change if a replica were made again: inode, times.

    By path: replicas of a model are filled side by side, and told as they end.
    """
    return guest.must(f"stat -c '%n %i %y %z' {' '.join(sorted(told.files.values()))}")


@dataclass(frozen=True)
class Runs:
    """What two runs of the program said, and what a replica was after each."""

    large: Order
    changed: Order
    first: dict[str, Told]
    left_by_first: str
    made: str
    second: dict[str, Told]
    left_by_second: str
    kept: str

    @property
    def filled(self) -> dict[int, str]:
        return self.first["large"].files


@pytest.fixture(scope="module")
def runs(guest: Guest) -> Runs:
    """One run makes replicas; the next, with another one to make, finds them.

    Programs take seconds to start in a guest: these two do all.
    """
    large = model(guest, "large", _LARGE, *_FILLED)
    changed = model(guest, "changed", _SMALL, _REFUSED)
    astray = replace(model(guest, "astray", _SMALL, _REFUSED), nodes=(_REFUSED + 1,))
    first = run(guest, large, replace(changed, sha256="0" * 64))
    left_by_first = remains(guest, first["changed"].targets[_REFUSED])
    made = identity(guest, first["large"])
    second = run(guest, large, astray)
    left_by_second = remains(guest, second["astray"].targets[_REFUSED])
    kept = identity(guest, second["large"])
    return Runs(large, changed, first, left_by_first, made, second, left_by_second, kept)


def test_each_domain_has_a_replica_with_all_pages_on_its_node(guest: Guest, runs: Runs) -> None:
    told = runs.first["large"]
    assert told.refused == {}
    assert [status.code for status in told.fillers] == [Exit.RIGHT] * len(_FILLED)
    assert told.states == dict.fromkeys(_FILLED, "ready")
    for domain in _FILLED:
        file = runs.filled[domain]
        assert guest.must(f"sha256sum {file}").split()[0] == runs.large.sha256
        record = msgspec.json.decode(guest.get(str(verified_path(Path(file)))), type=Verified)
        assert record.pages == {domain: _LARGE // _PAGE}
        seen = guest.must(f"{BIN}/python /opt/test/pages.py {file}")
        assert seen == f"N{domain}={_LARGE // _PAGE}"


def test_a_replica_lies_on_a_tmpfs_that_a_transient_unit_bound_to_the_domain(
    guest: Guest, runs: Runs
) -> None:
    for domain in _FILLED:
        at = Path(runs.filled[domain]).parent
        kind, options = guest.must(f"findmnt -n -o FSTYPE,OPTIONS --mountpoint {at}").split()
        assert kind == "tmpfs"
        assert f"mpol=bind:{domain}" in options.split(",")
        names = "ActiveState,Transient,Slice"
        shown = guest.must(f"systemctl show -p {names} '{mount_unit_name(at)}'")
        wanted = {"ActiveState=active", "Transient=yes", "Slice=corefleet-models.slice"}
        assert set(shown.split()) == wanted


def test_a_unit_that_sees_little_maps_the_replica_but_cannot_change_it(
    guest: Guest, runs: Runs
) -> None:
    file = runs.filled[_FILLED[0]]
    assert guest.must(f"stat -c %a {file}") == "444"
    unit = (
        "systemd-run --quiet --pipe --wait -p DynamicUser=yes -p PrivateTmp=yes "
        f"-p ProtectSystem=strict -p ReadWritePaths={Path(file).parent} bash -c"
    )
    attempts = f"sha256sum {file}; echo x >>{file} || touch {file}.new || rm -f {file}"
    tried = guest.run(f"{unit} '{attempts}'")
    assert tried.out.split()[:1] == [runs.large.sha256], tried
    assert tried.code != 0
    assert identity(guest, runs.second["large"]) == runs.made
    assert f"{file}.new" not in guest.must(f"ls {Path(file).parent}")


def test_after_a_restart_a_replica_is_adopted_without_a_new_fill(runs: Runs) -> None:
    told = runs.second["large"]
    assert told.files == runs.filled
    assert told.states == dict.fromkeys(_FILLED, "ready")
    assert told.fillers == ()
    assert runs.kept == runs.made


def test_a_filler_whose_memory_is_on_another_node_is_refused_and_leaves_nothing(
    runs: Runs,
) -> None:
    told = runs.second["astray"]
    assert told.files == {}
    found = f"misplaced: {_SMALL // _PAGE} pages on node {_REFUSED + 1}"
    assert found in told.refused[_REFUSED]
    assert {status.code for status in told.fillers} == {Exit.MISPLACED}
    assert told.states == {_REFUSED: "refused"}
    assert runs.left_by_second == ""


def test_a_model_with_another_checksum_is_refused_and_leaves_nothing(runs: Runs) -> None:
    told = runs.first["changed"]
    assert told.files == {}
    assert f"with sha256 {runs.changed.sha256}; expected" in told.refused[_REFUSED]
    assert [status.code for status in told.fillers] == [Exit.CORRUPT]
    assert told.states == {_REFUSED: "refused"}
    assert runs.left_by_first == ""


def test_mounts_and_their_memory_go_when_their_units_are_stopped(guest: Guest, runs: Runs) -> None:
    # The last test: others need the replicas.
    places = [Path(file).parent for file in runs.filled.values()]
    for at in places:
        assert guest.must(f"mountpoint {at}")
    before = shared_kib(guest)
    guest.must(f"systemctl stop {' '.join(mount_unit_name(at) for at in places)}")
    mounts = guest.get("/proc/self/mounts")
    for at in places:
        assert f" {at} " not in mounts
        assert guest.run(f"ls -A {at}").out == ""
    freed = before - shared_kib(guest)
    assert freed >= len(places) * _LARGE // 1024 * 9 // 10


def shared_kib(guest: Guest) -> int:
    """Return how much memory tmpfs and the like take."""
    return int(guest.must("grep ^Shmem: /proc/meminfo").split()[1])
