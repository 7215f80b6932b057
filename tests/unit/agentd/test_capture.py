"""A capture reads back as the machine it came from, and does not tell whose it is."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentd import capture as module
from agentd.capture import CapturedFs, CaptureRefused, capture
from agentd.capture_allowed import ALLOWED
from agentd.capture_scan import Identity, telltales
from agentd.capture_strip import LONGEST_CPUINFO_BYTES, GroupNames, stripped
from agentd.core.topology import Overrides
from agentd.discovery_json import as_report
from agentd.hostfs import HostFs
from agentd.probes import discover
from corefleet.errors import InvalidInput
from tests.unit.agentd.machines import two_sockets, write_tree

UUID = "0f8b2a4e-1c3d-4e5f-8a9b-0c1d2e3f4a5b"
CONTAINER = "58ebbd371802f3708298174533a424a0" * 2


def described(host: HostFs) -> str:
    """Return what discovery says of a machine, as agentd passes it."""
    return msgspec.json.encode(as_report(discover(host, Overrides()))).decode()


def owned() -> dict[str, str]:
    """The small machine with all that could tell whose it is."""
    group = f"user.slice/user-1000.slice/docker-{CONTAINER}.scope"
    cgroup = "sys/fs/cgroup"
    return two_sockets() | {
        "proc/self/cpuset": f"/{group}\n",
        "proc/self/smaps": "1000-2000 r--p 0 08:01 7 /home/alice/python\nSize: 64 kB\n"
        "KernelPageSize:       64 kB\nKernelPageSize:        4 kB\n",
        "proc/sys/kernel/hostname": "alice-laptop.example.org\n",
        "etc/machine-id": f"{CONTAINER[:32]}\n",
        "sys/class/net/eth0/address": "52:54:00:12:34:56\n",
        "sys/class/dmi/id/product_serial": "PF2XJ9QK\n",
        "sys/class/dmi/id/board_serial": "To be filled by O.E.M.\n",
        "sys/devices/system/cpu/cpu0/topology/ppin": "0x1122334455667788\n",
        "proc/version": "Linux version 6.1.0-13-alice (root@alice-laptop) #1 SMP\n",
        "proc/cmdline": f"root=UUID={UUID} ip=10.1.2.3 isolcpus=2,3 quiet hugepages=4\n",
        "proc/stat": "cpu  1 2 3\ncpu0 1 2 3\nintr 5 6\nbtime 1700000000\n",
        "proc/self/status": "Name:\tagentd\nPid:\t77\nCpus_allowed_list:\t0-15\n",
        "proc/self/cgroup": f"0::/{group}\n",
        "proc/self/cmdline": "agentd\0--config\0/home/alice/agentd.toml",
        "proc/mounts": "/dev/sda1 /home/alice ext4 rw 0 0\n"
        "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nsdelegate,x=alice-laptop 0 0\n",
        f"{cgroup}/cpuset.cpus.effective": "0-15\n",
        f"{cgroup}/cgroup.controllers": "cpuset cpu memory\n",
        f"{cgroup}/{group}/cpuset.cpus.effective": "0-3,8-11\n",
        f"{cgroup}/{group}/cgroup.procs": "77\n",
        f"{cgroup}/user.slice/user-1000.slice/cpuset.cpus.effective": "0-15\n",
        "sys/fs/resctrl/schemata": "MB:0=100;1=100\n",
        "sys/fs/resctrl/tasks": "1\n2\n",
        "sys/fs/resctrl/alice/schemata": "MB:0=50;1=50\n",
        "sys/fs/resctrl/corefleet-batch/mode": "shareable\n",
    }


def unpacked(archive: Path, to: Path) -> Path:
    """Unpack `archive` into `to`; return its one top directory."""
    with tarfile.open(archive) as file:
        file.extractall(to, filter="data")
    (top,) = to.iterdir()
    return top


def files_below(root: Path) -> dict[str, str]:
    """Return all files below `root` by path."""
    return {
        str(file.relative_to(root)): file.read_text() for file in root.rglob("*") if file.is_file()
    }


def take(tmp_path: Path, files: dict[str, str], name: str = "case") -> Path:
    """Capture a machine of `files`; return the unpacked case."""
    root = write_tree(tmp_path / "host", files).root
    capture(root, tmp_path / f"{name}.tar.gz", described)
    return unpacked(tmp_path / f"{name}.tar.gz", tmp_path / "unpacked")


def test_a_capture_reads_back_as_the_same_machine(tmp_path: Path) -> None:
    top = take(tmp_path, owned(), "x86-2p-2n")
    assert top.name == "x86-2p-2n"
    original = discover(HostFs(tmp_path / "host"), Overrides())
    again = discover(HostFs(top), Overrides())
    assert again.domains == original.domains
    assert again.siblings == original.siblings
    assert again.page_bytes == original.page_bytes == 65536
    assert again.domains[0].cpus == (0, 1, 2, 3, 8, 9, 10, 11)
    assert (tmp_path / "x86-2p-2n.expected.json").read_text().strip() == described(HostFs(top))


def test_all_that_discovery_reads_is_captured(tmp_path: Path) -> None:
    read: set[str] = set()

    class Watched(HostFs):
        def read(self, path: str, most_bytes: int = 1 << 20) -> str | None:
            return self._noted(path, super().read(path, most_bytes))

        def attribute(self, path: str) -> str | None:
            return self._noted(path, super().attribute(path))

        def _noted(self, path: str, text: str | None) -> str | None:
            if text is not None:
                read.add(os.path.normpath(path))
            return text

    top = take(tmp_path, two_sockets())
    discover(Watched(tmp_path / "host"), Overrides())
    assert read
    assert read <= set(files_below(top))


def test_nothing_tells_whose_machine_it_is(tmp_path: Path) -> None:
    stored = files_below(take(tmp_path, owned()))
    everything = "\n".join(f"{path}\n{text}" for path, text in stored.items()).lower()
    for word in ("alice", UUID, CONTAINER, "52:54", "10.1.2.3", "pf2xj9qk", "1122334455", "1000"):
        assert word not in everything, word
    assert stored["proc/cmdline"] == "isolcpus=2,3 hugepages=4\n"
    assert stored["proc/version"] == "Linux version 6.1.0\n"
    assert stored["proc/stat"] == "cpu  1 2 3\ncpu0 1 2 3\n"
    assert stored["proc/self/status"] == "Cpus_allowed_list:\t0-15\n"
    assert stored["proc/mounts"] == "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"
    assert not [path for path in stored if "ppin" in path or "procs" in path or "tasks" in path]


def test_our_own_control_groups_are_found_under_their_new_names(tmp_path: Path) -> None:
    stored = files_below(take(tmp_path, owned()))
    path = stored["proc/self/cgroup"].strip().removeprefix("0::")
    assert path.startswith("/user.slice/group")
    assert stored[f"sys/fs/cgroup{path}/cpuset.cpus.effective"] == "0-3,8-11\n"
    assert stored["proc/self/cpuset"].strip() == path
    above = path.rpartition("/")[0]
    assert stored[f"sys/fs/cgroup{above}/cpuset.cpus.effective"] == "0-15\n"


def test_resctrl_groups_of_others_lose_their_names_and_ours_keep_them(tmp_path: Path) -> None:
    stored = files_below(take(tmp_path, owned()))
    groups = {path for path in stored if path.startswith("sys/fs/resctrl/")}
    assert "sys/fs/resctrl/schemata" in groups
    (other,) = [path for path in groups if "/group" in path]
    assert stored[other] == "MB:0=50;1=50\n"
    assert "sys/fs/resctrl/corefleet-batch/mode" in groups


def test_two_captures_of_a_tree_are_the_same_bytes(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "host", owned()).root
    archives = []
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        report = capture(root, tmp_path / place / "case.tar.gz", described)
        archives.append(report.file.read_bytes())
        assert report.bytes == len(archives[-1])
        os.utime(root / "proc/cpuinfo", (1, 1))
    assert archives[0] == archives[1]


def test_only_regular_files_and_directories_are_in_the_archive(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu"
    root = write_tree(tmp_path / "host", two_sockets()).root
    (tmp_path / "secret").write_text("0-1\n")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "level").write_text("3\n")
    (root / cpu / "isolated").symlink_to(tmp_path / "secret")
    (root / cpu / "offline").symlink_to("online")
    os.mkfifo(root / cpu / "present")
    (root / cpu / "cpu0" / "cache").mkdir()
    (root / cpu / "cpu0" / "cache" / "index0").symlink_to(tmp_path / "outside")
    (root / cpu / "cpu0" / "node0").symlink_to("../../node/node0")
    report = capture(root, tmp_path / "case.tar.gz", described)
    with tarfile.open(report.file) as archive:
        members = {member.name.removeprefix("case/"): member for member in archive}
    assert all(member.isreg() or member.isdir() for member in members.values())
    assert all((m.mtime, m.uid, m.gid, m.uname) == (0, 0, 0, "") for m in members.values())
    assert list(members) == sorted(members)
    assert f"{cpu}/offline" in members
    assert members[f"{cpu}/cpu0/node0"].isdir()
    assert not {f"{cpu}/isolated", f"{cpu}/present"} & set(members)
    assert not [name for name in members if "cache" in name]


@pytest.mark.parametrize(
    ("path", "text", "why"),
    [
        ("proc/cpuinfo", "model name : alice-laptop special\n", "the host name"),
        ("proc/cpuinfo", "model name : PF2XJ9QK\n", "a serial number of this machine"),
        ("proc/cpuinfo", f"board : {UUID}\n", "a UUID"),
        ("proc/cpuinfo", f"board : {CONTAINER}\n", "a machine or container id"),
        ("sys/fs/resctrl/info/last_cmd_status", "from 52:54:00:aa:bb:cc\n", "a network address"),
        ("sys/fs/resctrl/info/last_cmd_status", "from fe80::1:2:3\n", "a network address"),
        ("sys/fs/resctrl/info/last_cmd_status", "from 192.168.1.7\n", "an IP address"),
    ],
)
def test_a_capture_that_still_tells_is_refused_and_nothing_is_written(
    tmp_path: Path, path: str, text: str, why: str
) -> None:
    root = write_tree(tmp_path / "host", owned() | {path: text}).root
    (tmp_path / "out").mkdir()
    with pytest.raises(CaptureRefused, match=rf"{path}: {why}, "):
        capture(root, tmp_path / "out" / "case.tar.gz", described)
    assert list((tmp_path / "out").iterdir()) == []


def test_links_from_nodes_to_cpus_keep_their_names(tmp_path: Path) -> None:
    node = "sys/devices/system/node/node1"
    files = {path: text for path, text in two_sockets().items() if path != f"{node}/cpulist"}
    root = write_tree(tmp_path / "host", files).root
    for cpu in (4, 5, 6, 7, 12, 13, 14, 15):
        (root / f"sys/devices/system/cpu/cpu{cpu}/topology").mkdir(parents=True, exist_ok=True)
        (root / node / f"cpu{cpu}").symlink_to(f"../../cpu/cpu{cpu}")
    capture(root, tmp_path / "case.tar.gz", described)
    again = discover(HostFs(unpacked(tmp_path / "case.tar.gz", tmp_path / "un")), Overrides())
    assert again.domains == discover(HostFs(root), Overrides()).domains
    assert again.domains[1].cpus == (4, 5, 6, 7, 12, 13, 14, 15)


def test_the_expected_values_are_searched_too(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "host", owned()).root
    with pytest.raises(CaptureRefused, match=r"case\.expected\.json: the host name"):
        capture(root, tmp_path / "case.tar.gz", lambda host: '{"node": "alice-laptop"}')


@pytest.mark.parametrize("name", ["case.zip", "a b.tar.gz", ".tar.gz", "Case.tar.gz", "-x.tar.gz"])
def test_a_name_that_is_no_case_id_is_refused(tmp_path: Path, name: str) -> None:
    root = write_tree(tmp_path / "host", two_sockets()).root
    with pytest.raises(InvalidInput, match="--output"):
        capture(root, tmp_path / name, described)


def test_an_earlier_capture_is_not_overwritten(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "host", two_sockets()).root
    (tmp_path / "case.expected.json").write_text("corrected by hand")
    with pytest.raises(InvalidInput, match="a file that is not there yet"):
        capture(root, tmp_path / "case.tar.gz", described)
    assert (tmp_path / "case.expected.json").read_text() == "corrected by hand"


def test_a_directory_that_is_no_machine_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidInput, match="--root"):
        capture(tmp_path / "empty", tmp_path / "case.tar.gz", described)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "host", two_sockets()).root
    with pytest.raises(InvalidInput, match=r"--output.*No such file"):
        capture(root, tmp_path / "not there" / "case.tar.gz", described)


def test_a_file_that_is_too_large_is_left_out_and_named(tmp_path: Path) -> None:
    large = {"sys/devices/system/cpu/present": "0," * module.FILE_BYTES}
    root = write_tree(tmp_path / "host", two_sockets() | large).root
    report = capture(root, tmp_path / "case.tar.gz", described)
    (line,) = report.left_out
    assert line.startswith("sys/devices/system/cpu/present: ")


def test_too_much_of_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write_tree(tmp_path / "host", two_sockets()).root
    monkeypatch.setattr(module, "TOTAL_BYTES", 100)
    with pytest.raises(CaptureRefused, match="more than 100 bytes"):
        capture(root, tmp_path / "case.tar.gz", described)


def test_the_flags_of_many_equal_cpus_are_said_once_and_mean_the_same(tmp_path: Path) -> None:
    flags = " ".join(f"flag{n}" for n in range(200))
    block = f"flags\t\t: lm {flags}\ncpu MHz\t\t: 1234.5\nSerial\t\t: 12345\n\n"
    text = "".join(f"processor\t: {cpu}\n{block}" for cpu in range(1024))
    short = stripped("proc/cpuinfo", text, GroupNames())
    assert short.count("flags") == 1
    assert short.count("processor") == 1024
    assert len(short) < LONGEST_CPUINFO_BYTES
    assert "MHz" not in short
    assert "Serial" not in short
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(short)
    found = discover(HostFs(tmp_path), Overrides())
    assert found.online == tuple(range(1024))
    assert {"lm", "flag0", "flag199"} <= set(found.features)


def test_the_identification_of_a_mainframe_is_zeroed() -> None:
    line = "processor 1: version = 00,  identification = 0A1B2C,  machine = 2817\n"
    assert stripped("proc/cpuinfo", line, GroupNames()) == (
        "processor 1: version = 00,  identification = 000000,  machine = 2817\n"
    )


def test_known_groups_keep_their_names_and_each_other_has_one_name() -> None:
    names = GroupNames()
    path = "/kubepods.slice/pod-secret.slice/corefleet-batch-d1.slice/pod-secret.slice"
    assert names.path(path) == (
        "/kubepods.slice/group1.slice/corefleet-batch-d1.slice/group1.slice"
    )
    assert names.path("/user.slice/session-3.scope") == "/user.slice/group2.scope"


def test_a_host_that_is_called_like_a_part_of_it_can_be_captured() -> None:
    files = {"proc/stat": "cpu0 1 2\n"}
    for name in ("cpu0", "node1", "localhost", "17"):
        assert telltales(files, Identity.of([name], [], [])) == []
    assert telltales({"proc/cpuinfo": "at titan-7\n"}, Identity.of(["Titan-7.lan"], [], []))


def test_placeholders_of_firmware_are_no_serials() -> None:
    for text in ("To Be Filled By O.E.M.", "Default string", "None", "0000000", "0123456789"):
        assert Identity.of([], [text], []).words == ()


@pytest.mark.parametrize(
    "text",
    [
        "00000000,00000000,ffffffff,00ff00ff\n",
        "MB:0=100;1=100\nL3:0=fffff;1=fffff\n",
        "0-31:2/4,64-95\n",
        "event=0x3c,umask=0x01\n",
        "config1:0-15\nconfig:0-7,21\n",
        "10 21 31 31 21 10\n",
        "9:name=systemd:/\n0::/user.slice\n",
        "0" * 64,
    ],
)
def test_what_the_kernel_writes_is_taken_for_no_address(text: str) -> None:
    assert telltales({"f": text}, Identity()) == []


@given(st.dictionaries(st.from_regex(r"[ab](/[ab]){0,3}", fullmatch=True), st.text(), max_size=8))
def test_a_capture_in_memory_lists_what_it_holds(files: dict[str, str]) -> None:
    host = CapturedFs(files, {"d/e"})
    for path, text in files.items():
        assert host.read(f"./{path}") == text
        assert host.exists(path)
        above, _, name = path.rpartition("/")
        assert name in host.names(above)
    assert set(host.names("")) == {path.split("/")[0] for path in files} | {"d"}
    assert (host.names("d"), host.directories("d"), host.names("d/e")) == (["e"], ["e"], [])
    assert host.read("c") is None
    assert host.attribute("c") is None
    assert not host.exists("c")


def test_no_serial_number_is_on_the_list() -> None:
    listed = {
        f"{directory}/{name}" for directory, names in ALLOWED.items() for name in names.split()
    }
    assert not [path for path in listed if "ppin" in path or "dmi" in path or "serial" in path]
