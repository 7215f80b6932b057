"""The program that fills a replica: right bytes on the right node, or nothing at all."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from agentd.filler.app import FillRefused, Order, fill, main, pages_by_node
from agentd.filler.record import (
    Exit,
    clear,
    part_path,
    read_failure,
    read_verified,
    verified_path,
)
from agentd.filler.run import Source, replica_path, sweep
from agentd.hostfs import HostFs
from tests.unit.agentd.machines import write_tree
from tests.unit.agentd.replica_mounting import DOMAIN, MIB, model_at, mounted

PAGE = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path / "with space" / "d0")


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return model_at(tmp_path / "model.gguf")


def order(source: Source, place: Path, **changed: object) -> Order:
    made = Order(
        model="small",
        source=source.path,
        target=place / "small.gguf",
        size_bytes=source.size_bytes,
        sha256=source.sha256,
        domain=DOMAIN.domain,
        cpus="0",
    )
    return msgspec.structs.replace(made, **changed)


def run(asked: Order) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", *asked.command())
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def names(place: Path) -> set[str]:
    return {path.name for path in place.iterdir() if not path.name.endswith(".lock")}


def test_the_program_makes_a_read_only_copy_whose_pages_all_lie_on_the_node(
    source: Source, place: Path
) -> None:
    ran = run(order(source, place))
    assert (ran.returncode, ran.stderr) == (Exit.RIGHT, "")
    target = place / "small.gguf"
    assert target.read_bytes() == source.path.read_bytes()
    assert target.stat().st_mode & 0o777 == 0o444
    record = read_verified(target, source.sha256, source.size_bytes)
    assert record is not None
    assert record.pages == {DOMAIN.domain: -(-source.size_bytes // PAGE)}
    assert names(place) == {"small.gguf", ".small.gguf.verified"}


def test_another_checksum_is_refused_and_nothing_is_left(source: Source, place: Path) -> None:
    ran = run(order(source, place, sha256="0" * 64))
    assert ran.returncode == Exit.CORRUPT
    assert f"sha256 {source.sha256}" in ran.stderr
    assert names(place) == {".small.gguf.failed"}
    assert source.sha256 in read_failure(place / "small.gguf")


def test_another_size_is_refused_before_a_byte_is_copied(source: Source, place: Path) -> None:
    with pytest.raises(FillRefused, match=f"expected {source.size_bytes + 1}") as refused:
        fill(order(source, place, size_bytes=source.size_bytes + 1), HostFs())
    assert refused.value.code is Exit.CORRUPT
    assert names(place) == set()


def test_a_source_that_is_missing_is_said(source: Source, place: Path) -> None:
    source.path.unlink()
    assert main(list(order(source, place).command()[1:])) == Exit.SOURCE
    assert "No such file" in read_failure(place / "small.gguf")


def test_a_full_tmpfs_is_said_and_nothing_is_left(place: Path, tmp_path: Path) -> None:
    large = model_at(tmp_path / "large.gguf", size=90 * MIB)
    with pytest.raises(FillRefused, match="No space left") as refused:
        fill(order(large, place), HostFs())
    assert refused.value.code is Exit.NO_ROOM
    assert names(place) == set()


def test_a_directory_that_is_no_bound_tmpfs_is_refused(source: Source, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    ran = run(order(source, bare))
    assert ran.returncode == Exit.UNMOUNTED
    assert "nothing is mounted there" in ran.stderr
    assert names(bare) == set()


def test_a_tmpfs_of_another_node_is_refused(source: Source, place: Path) -> None:
    with pytest.raises(FillRefused, match="expected mpol=bind:63"):
        fill(order(source, place, domain=63), HostFs())


def machine_with(tmp_path: Path, place: Path, pages: str) -> HostFs:
    """Return a machine that shows our mount, and the part file's pages as we like."""
    shown = str(place).replace(" ", "\\040")
    part = str(part_path(place / "small.gguf")).replace(" ", "\\040")
    files = {
        "proc/self/mounts": f"tmpfs {shown} tmpfs rw,mpol=bind:{DOMAIN.domain} 0 0\n",
        "proc/self/numa_maps": f"7f00 default file={part} mapped=9 {pages}\n",
    }
    return write_tree(tmp_path / "machine", files)


def test_pages_on_another_node_are_refused_with_their_number(
    source: Source, place: Path, tmp_path: Path
) -> None:
    host = machine_with(tmp_path, place, f"N{DOMAIN.domain}=700 N5=69 kernelpagesize_kB=4")
    with pytest.raises(FillRefused, match="misplaced: 69 pages on node 5") as refused:
        fill(order(source, place), host)
    assert refused.value.code is Exit.MISPLACED
    assert names(place) == set()


def test_pages_that_the_kernel_does_not_show_are_not_taken_for_right(
    source: Source, place: Path, tmp_path: Path
) -> None:
    host = machine_with(tmp_path, place, f"N{DOMAIN.domain}=7 kernelpagesize_kB=4")
    with pytest.raises(FillRefused, match="numa_maps shows 7 of") as refused:
        fill(order(source, place), host)
    assert refused.value.code is Exit.UNVERIFIABLE


def test_a_killed_filler_leaves_a_part_that_the_next_one_replaces(
    source: Source, place: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / "slow"
    os.mkfifo(pipe)
    writer_end = os.open(pipe, os.O_RDWR)
    slow = msgspec.structs.replace(order(source, place), source=pipe, size_bytes=0)
    filler = subprocess.Popen((sys.executable, "-m", *slow.command()))
    try:
        os.write(writer_end, b"half of it")
        # It has read that when the pipe is empty again, and waits for more.
        while _waiting_bytes(writer_end) or not part_path(slow.target).exists():
            assert filler.poll() is None
            os.sched_yield()
        assert run(order(source, place)).returncode == Exit.BUSY
    finally:
        filler.kill()
        assert filler.wait() == -signal.SIGKILL
        os.close(writer_end)
    assert part_path(slow.target).exists()
    assert read_verified(slow.target, source.sha256, source.size_bytes) is None
    fill(order(source, place), HostFs())
    assert slow.target.read_bytes() == source.path.read_bytes()
    assert not part_path(slow.target).exists()


def _waiting_bytes(descriptor: int) -> int:
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4), sys.byteorder)


def test_a_right_replica_is_looked_at_again_and_not_copied(source: Source, place: Path) -> None:
    fill(order(source, place), HostFs())
    inode = (place / "small.gguf").stat().st_ino
    fill(order(source, place), HostFs())
    assert (place / "small.gguf").stat().st_ino == inode


def test_a_replica_that_was_changed_since_is_none(source: Source, place: Path) -> None:
    fill(order(source, place), HostFs())
    target = place / "small.gguf"
    os.utime(target, ns=(1, 1))
    assert read_verified(target, source.sha256, source.size_bytes) is None
    assert read_verified(target, "0" * 64, source.size_bytes) is None
    verified_path(target).write_bytes(b"{nonsense")
    assert read_verified(target, source.sha256, source.size_bytes) is None


def test_a_sweep_keeps_right_replicas_and_removes_all_else(source: Source, place: Path) -> None:
    target = replica_path(place, "small", source)
    fill(order(source, place, target=target), HostFs())
    (place / ".other.gguf.part").write_bytes(b"left")
    (place / "old.gguf").write_bytes(b"left")
    assert sweep(place, DOMAIN.domain, {"small": source}) == ["small"]
    assert names(place) == {target.name, verified_path(target).name}
    assert sweep(place, DOMAIN.domain + 1, {"small": source}) == []
    assert names(place) == set()


def test_numa_maps_are_read_as_the_kernel_writes_them() -> None:
    text = (
        "7f10 default file=/run/d1/.a.part mapped=1024 active=0 N1=1000 N3=24 kernelpagesize_kB=4\n"
        "7f20 default file=/run/d1/.a.part2 mapped=5 N0=5 kernelpagesize_kB=4\n"
        "7f30 default file=/run/d1/.a.part mapped=8 N1=8 kernelpagesize_kB=4\n"
        "7f40 default heap anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n"
    )
    assert pages_by_node(text, Path("/run/d1/.a.part")) == {1: 1008, 3: 24}
    spaced = "7f10 default file=/run/a\\040b/.m.part mapped=2 N0=2 kernelpagesize_kB=4"
    assert pages_by_node(spaced, Path("/run/a b/.m.part")) == {0: 2}


def test_clearing_what_is_not_there_is_no_trouble(tmp_path: Path) -> None:
    clear(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []
