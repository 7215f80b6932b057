"""The parts of tools.guest that need no guest."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tools.guest import host, payload
from tools.guest.cache import LOG, held, keep_newest, key_of, made_once
from tools.guest.errors import GuestError, MissingPrograms
from tools.guest.image import Image, write_sources
from tools.guest.layout import Attached, Layout, qemu_command
from tools.guest.machine import Machine
from tools.guest.qmp import Monitor

STANZA = """\
Types: deb
URIs: http://archive.example/debian
Suites: bookworm bookworm-updates
Components: main

Types: deb
URIs: http://tools.example/apt
Suites: stable
Components: main
"""


def fill(scratch: Path) -> None:
    (scratch / "whole").write_text("yes")


def test_what_is_cached_is_not_made_again(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(scratch: Path) -> None:
        made.append(scratch)
        fill(scratch)

    first = made_once("thing", make, tmp_path)
    second = made_once("thing", made.append, tmp_path)

    assert first == second == tmp_path / "thing"
    assert (first / "whole").read_text() == "yes"
    assert len(made) == 1


def test_what_failed_to_be_made_leaves_its_log_and_nothing_else(tmp_path: Path) -> None:
    def fail(scratch: Path) -> None:
        (scratch / LOG).write_text("why")
        raise GuestError("no")

    with pytest.raises(GuestError, match="no"):
        made_once("thing", fail, tmp_path)

    assert (tmp_path / "thing.failed.log").read_text() == "why"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_what_a_killed_maker_left_is_thrown_away(tmp_path: Path) -> None:
    killed = (
        "import os, sys; from pathlib import Path; from tools.guest.cache import made_once\n"
        "def make(scratch):\n"
        "    (scratch / 'half').write_text('no'); os.kill(os.getpid(), 9)\n"
        "made_once('thing', make, Path(sys.argv[1]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", killed, str(tmp_path)], cwd=payload.ROOT, check=False
    )
    assert run.returncode == -9
    assert len(list(tmp_path.glob(".thing.making-*"))) == 1

    made = made_once("thing", fill, tmp_path)

    assert [path.name for path in made.iterdir()] == ["whole"]
    assert list(tmp_path.glob(".thing.making-*")) == []


def test_two_that_ask_at_the_same_time_make_it_once(tmp_path: Path) -> None:
    entered, may_end = threading.Event(), threading.Event()
    made: list[Path] = []

    def slowly(scratch: Path) -> None:
        made.append(scratch)
        entered.set()
        assert may_end.wait(10)

    askers = [
        threading.Thread(target=made_once, args=("thing", slowly, tmp_path)) for _ in range(2)
    ]
    for asker in askers:
        asker.start()
    assert entered.wait(10)
    may_end.set()
    for asker in askers:
        asker.join()

    assert len(made) == 1


def test_only_the_newest_and_those_in_use_are_kept(tmp_path: Path) -> None:
    made = [made_once(f"app-{number}", fill, tmp_path) for number in range(3)]
    other = made_once("base-0", fill, tmp_path)

    with held(made[0]):
        keep_newest(tmp_path, "app-", 1)

    assert [path.exists() for path in (*made, other)] == [True, False, True, True]


def test_keys_tell_where_one_part_ends(tmp_path: Path) -> None:
    assert key_of("ab", "c") != key_of("a", "bc")
    assert key_of("ab", "c") == key_of(b"ab", b"c")


def test_a_missing_program_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(host, "_SBIN", "/nowhere")

    with pytest.raises(MissingPrograms, match="apt-get install mmdebstrap qemu-system-x86"):
        host.need(["qemu-system-x86_64", "mmdebstrap"])


def test_a_failed_program_is_shown_with_what_it_said(tmp_path: Path) -> None:
    with pytest.raises(GuestError, match=r"ended with 3:[^$]*no space"):
        host.run(["sh", "-c", "echo no space; exit 3"], tmp_path / "log", 10)


def test_only_debian_sources_of_the_host_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/debian.sources").write_text(STANZA)
    (tmp_path / "sources.list").write_text("deb http://archive.example/debian trixie main\n")
    monkeypatch.setattr(
        "tools.etcd_fetch.os_release", lambda: {"ID": "debian", "VERSION_CODENAME": "trixie"}
    )
    into = tmp_path / "into"
    into.mkdir()

    texts = sorted(file.read_text() for file in write_sources(into, tmp_path))

    assert len(texts) == 2
    assert "Suites: bookworm bookworm-updates" in texts[0]
    assert texts[1] == "deb http://archive.example/debian bookworm main\n"


def test_distances_are_symmetric_and_pairs_are_near() -> None:
    layout = Layout(nodes=4)
    matrix = [[layout.distance(a, b) for b in range(4)] for a in range(4)]

    assert matrix == [[10, 21, 31, 31], [21, 10, 31, 31], [31, 31, 10, 21], [31, 31, 21, 10]]


def test_each_node_has_its_cpus_and_memory_on_the_command_line(tmp_path: Path) -> None:
    layout = Layout(nodes=2, cpus_per_node=2, node_memory_mb=512)
    monitor, console = tmp_path / "m", tmp_path / "c"
    attached = Attached(
        Image(tmp_path), tmp_path / "d", None, monitor, console, tmp_path / "l", {2200: 22, 90: 80}
    )

    line = " ".join(qemu_command(layout, attached))

    assert "-smp 4,sockets=2,cores=2" in line
    assert "-m 1024" in line
    assert "node,nodeid=1,cpus=2-3,memdev=m1" in line
    assert "hostfwd=tcp:127.0.0.1:2200-:22,hostfwd=tcp:127.0.0.1:90-:80" in line
    assert "-incoming" not in line


@pytest.mark.usefixtures("guest_programs")
def test_a_qemu_that_does_not_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    image = Image(tmp_path)
    image.disk.write_bytes(bytes(1 << 20))  # and no kernel
    machine = Machine(Layout(nodes=1), image)

    with pytest.raises(GuestError, match="could not open kernel file"), machine:
        pass

    assert not machine.directory.exists()


def test_a_monitor_says_that_qemu_ended() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b'{"QMP": {}}\n{"return": {}}\n{"event": "STOP"}\n{"return": {"x": 1}}\n')
        monitor = Monitor(ours)
        assert monitor.execute("query") == {"x": 1}
        theirs.close()

        with pytest.raises(GuestError, match="QEMU"):
            monitor.execute("query")


def test_the_payload_holds_what_the_project_asks_for() -> None:
    assert any(each.startswith("msgspec") for each in payload.project_requirements())
    assert any(each.startswith("cysystemd") for each in payload.project_requirements())
    assert payload.commands()["agentd"] == "agentd.app:main"
