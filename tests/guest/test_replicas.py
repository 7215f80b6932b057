"""Model replicas on real NUMA nodes, mounted and filled by a real systemd: node rule 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

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
_ELSEWHERE = 2
"""A domain without the large model's replica."""

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
def programs(guest: Guest) -> Iterator[None]:
    guest.put(_PROGRAM, (Path(__file__).parent / "replica_node.py").read_text())
    guest.put("/opt/test/pages.py", _PAGES)
    guest.must(f"mkdir -p {_MODELS}")
    yield
    guest.must("systemctl stop $(systemctl list-units --plain --no-legend "
               "'run-corefleet-models-*.mount' | cut -d' ' -f1); true")  # fmt: skip


def model(guest: Guest, name: str, size: int, *domains: int) -> Order:
    """Make a file of random bytes and return the order for it."""
    path = f"{_MODELS}/{name}.gguf"
    digest = guest.must(f"head -c {size} /dev/urandom >{path} && sha256sum {path}").split()[0]
    return Order(name, Path(path), size, digest, domains, size + _MIB)


def run(guest: Guest, order: Order) -> Told:
    """Carry out an order in the guest, by a program of its own."""
    guest.put("/opt/test/order.json", msgspec.json.encode(order, enc_hook=str))
    said = guest.must(f"cd / && {BIN}/python {_PROGRAM} /opt/test/order.json", _RUN_LIMIT_S)
    return msgspec.json.decode(said.splitlines()[-1], type=Told)


def remains(guest: Guest, target: str) -> str:
    """Return the files beside a replica that take room."""
    return guest.must(f"find {Path(target).parent} -type f -size +0")


@pytest.fixture(scope="module")
def large(guest: Guest) -> Order:
    return model(guest, "large", _LARGE, *_FILLED)


@pytest.fixture(scope="module")
def filled(guest: Guest, large: Order) -> Told:
    """Two domains have the large model's replica; the program that made them is gone."""
    return run(guest, large)


def test_each_domain_has_a_replica_with_all_pages_on_its_node(
    guest: Guest, large: Order, filled: Told
) -> None:
    assert filled.refused == {}
    assert [status.code for status in filled.fillers] == [Exit.RIGHT] * 2
    assert {state.domain: state.state for state in filled.states} == dict.fromkeys(_FILLED, "ready")
    for domain in _FILLED:
        file = filled.files[domain]
        assert guest.must(f"sha256sum {file}").split()[0] == large.sha256
        record = msgspec.json.decode(guest.get(str(verified_path(Path(file)))), type=Verified)
        assert record.pages == {domain: _LARGE // _PAGE}
        seen = guest.must(f"{BIN}/python /opt/test/pages.py {file}")
        assert seen == f"N{domain}={_LARGE // _PAGE}"


def test_a_replica_lies_on_a_tmpfs_that_a_transient_unit_bound_to_the_domain(
    guest: Guest, filled: Told
) -> None:
    for domain in _FILLED:
        at = Path(filled.files[domain]).parent
        kind, options = guest.must(f"findmnt -n -o FSTYPE,OPTIONS --mountpoint {at}").split()
        assert kind == "tmpfs"
        assert f"mpol=bind:{domain}" in options.split(",")
        unit = mount_unit_name(at)
        shown = guest.must(f"systemctl show -P ActiveState -P Transient -P Slice '{unit}'")
        assert shown.split() == ["active", "yes", "corefleet-models.slice"]


def test_a_unit_that_sees_little_maps_the_replica_but_cannot_change_it(
    guest: Guest, large: Order, filled: Told
) -> None:
    file = filled.files[_FILLED[0]]
    assert guest.must(f"stat -c %a {file}") == "444"
    unit = (
        "systemd-run --quiet --pipe --wait -p DynamicUser=yes -p PrivateTmp=yes "
        f"-p ProtectSystem=strict -p ReadWritePaths={Path(file).parent} bash -c"
    )
    attempts = f"sha256sum {file}; echo x >>{file} || touch {file}.new || rm -f {file}"
    tried = guest.run(f"{unit} '{attempts}'")
    assert tried.out.split()[:1] == [large.sha256], tried
    assert tried.code != 0
    assert guest.must(f"sha256sum {file}").split()[0] == large.sha256
    assert f"{file}.new" not in guest.must(f"ls {Path(file).parent}")


def test_after_a_restart_a_replica_is_adopted_without_a_new_fill(
    guest: Guest, large: Order, filled: Told
) -> None:
    files = " ".join(filled.files.values())
    before = guest.must(f"stat -c '%i %y %z' {files}")
    again = run(guest, large)
    assert again.files == filled.files
    assert again.fillers == ()
    assert guest.must(f"stat -c '%i %y %z' {files}") == before


def test_a_filler_whose_memory_is_on_another_node_is_refused_and_leaves_nothing(
    guest: Guest,
) -> None:
    order = model(guest, "astray", _SMALL, _ELSEWHERE)
    told = run(guest, msgspec.structs.replace(order, nodes=(_ELSEWHERE + 1,)))
    assert told.files == {}
    pages = _SMALL // _PAGE
    assert f"misplaced: {pages} pages on node {_ELSEWHERE + 1}" in told.refused[_ELSEWHERE]
    assert {status.code for status in told.fillers} == {Exit.MISPLACED}
    assert remains(guest, told.targets[_ELSEWHERE]) == ""


def test_a_model_with_another_checksum_is_refused_and_leaves_nothing(guest: Guest) -> None:
    order = model(guest, "changed", _SMALL, _ELSEWHERE)
    told = run(guest, msgspec.structs.replace(order, sha256="0" * 64))
    assert told.files == {}
    assert f"with sha256 {order.sha256}; expected" in told.refused[_ELSEWHERE]
    assert [status.code for status in told.fillers] == [Exit.CORRUPT]
    assert remains(guest, told.targets[_ELSEWHERE]) == ""


def test_a_mount_and_its_memory_go_when_its_unit_is_stopped(guest: Guest) -> None:
    told = run(guest, model(guest, "short", _SMALL, 0))
    at = Path(told.files[0]).parent
    assert str(at) in guest.get("/proc/self/mounts")
    guest.must(f"systemctl stop '{mount_unit_name(at)}'")
    assert str(at) not in guest.get("/proc/self/mounts")
    assert guest.run(f"ls -A {at}").out == ""
