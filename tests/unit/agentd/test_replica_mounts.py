"""Mounting a domain's tmpfs: what systemd is told, and real mounts where they are permitted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from dbus_fast import Variant

from agentd.filler.mounted import MARGIN_BYTES, mount_at, mount_size, wrong_mount
from agentd.hostfs import HostFs
from agentd.replica_mounts import (
    SMALLEST_HUGE_BYTES,
    PlainMounts,
    SystemdMounts,
    choose_mounts,
    mount_unit_name,
    use_huge,
)
from corefleet.errors import LaunchFailed
from tests.unit.agentd.machines import write_tree
from tests.unit.agentd.replica_mounting import DOMAIN, MIB, unmount_all, why_no_mounts

AT = Path("/run/corefleet/models/d2")
SHMEM = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


@dataclass
class ScriptedSystemd:
    """Answers as told; a started unit appears in the machine's list of mounts, if it works."""

    root: Path
    result: str = "done"
    shows: str = "tmpfs /run/corefleet/models/d2 tmpfs rw,size=81920k,mpol=bind:2 0 0\n"
    stops: bool = True
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    @property
    def host(self) -> HostFs:
        return HostFs(self.root)

    def show(self, text: str) -> None:
        write_tree(self.root, {"proc/self/mounts": text})

    async def start_transient(
        self, unit: str, properties: tuple[tuple[str, Variant], ...], timeout_s: float
    ) -> str:
        self.told.append((unit, {name: value.value for name, value in properties}))
        if self.result == "done":
            self.show(self.shows)
        return self.result

    async def stop(self, unit: str, timeout_s: float) -> str:
        self.stopped.append(unit)
        if self.stops:
            self.show("")
        return "done" if self.stops else "failed"

    async def manager(self, member: str, signature: str = "", *body: object) -> list[Any]:
        raise LaunchFailed("no such unit")


@pytest.fixture
def systemd(tmp_path: Path) -> ScriptedSystemd:
    return ScriptedSystemd(tmp_path)


@pytest.fixture
def at(tmp_path: Path) -> Iterator[Path]:
    if why_no_mounts():
        pytest.skip(why_no_mounts())
    yield tmp_path / "run" / "d0"
    unmount_all(tmp_path / "run" / "d0")


# Expected: `systemd-escape --path --suffix=mount` of systemd 252.
@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("/run/corefleet/models/d2", "run-corefleet-models-d2.mount"),
        ("/run/core-fleet/d.2", "run-core\\x2dfleet-d.2.mount"),
        ("/.hidden/a b", "\\x2ehidden-a\\x20b.mount"),
        ("/", "-.mount"),
    ],
)
def test_a_mount_point_is_escaped_as_systemd_does(path: str, unit: str) -> None:
    assert mount_unit_name(Path(path)) == unit


async def test_systemd_is_told_of_a_tmpfs_bound_to_the_node(systemd: ScriptedSystemd) -> None:
    mounts = SystemdMounts(systemd, systemd.host)
    assert await mounts.mount(AT, 2, 64 * MIB, huge=True) == 64 * MIB
    ((unit, properties),) = systemd.told
    assert unit == "run-corefleet-models-d2.mount"
    assert properties["What"] == properties["Type"] == "tmpfs"
    assert properties["Slice"] == "corefleet-models.slice"
    options = properties["Options"].split(",")
    assert {"mpol=bind:2", "huge=within_size", f"size={64 * MIB + MARGIN_BYTES}"} <= set(options)


async def test_a_right_mount_is_used_as_it_is(systemd: ScriptedSystemd) -> None:
    systemd.show(systemd.shows)
    assert await SystemdMounts(systemd, systemd.host).mount(AT, 2, 8 * MIB, huge=False) == 8 * MIB
    assert not systemd.told
    assert not systemd.stopped


async def test_a_mount_without_the_policy_is_replaced(systemd: ScriptedSystemd) -> None:
    systemd.show("tmpfs /run/corefleet/models/d2 tmpfs rw,size=81920k 0 0\n")
    await SystemdMounts(systemd, systemd.host).mount(AT, 2, 8 * MIB, huge=False)
    assert systemd.stopped == ["run-corefleet-models-d2.mount"]
    assert len(systemd.told) == 1


async def test_a_wrong_mount_that_stays_is_refused(systemd: ScriptedSystemd) -> None:
    systemd.show("tmpfs /run/corefleet/models/d2 tmpfs rw,size=81920k,mpol=bind:1 0 0\n")
    systemd.stops = False
    with pytest.raises(LaunchFailed, match="mpol=bind:1; expected mpol=bind:2"):
        await SystemdMounts(systemd, systemd.host).mount(AT, 2, 8 * MIB, huge=False)


async def test_a_smaller_mount_in_use_stays_and_says_its_size(systemd: ScriptedSystemd) -> None:
    systemd.show(systemd.shows)
    systemd.stops = False
    mounts = SystemdMounts(systemd, systemd.host)
    assert await mounts.mount(AT, 2, 500 * MIB, huge=False) == 64 * MIB


async def test_a_mount_that_systemd_cannot_make_is_an_error(systemd: ScriptedSystemd) -> None:
    systemd.result = "failed"
    with pytest.raises(LaunchFailed, match=r"d2\.mount did not start: job failed"):
        await SystemdMounts(systemd, systemd.host).mount(AT, 2, 8 * MIB, huge=False)


async def test_a_mount_that_lost_its_policy_on_the_way_is_an_error(
    systemd: ScriptedSystemd,
) -> None:
    systemd.shows = "tmpfs /run/corefleet/models/d2 tmpfs rw,size=81920k 0 0\n"
    with pytest.raises(LaunchFailed, match="no mpol="):
        await SystemdMounts(systemd, systemd.host).mount(AT, 2, 8 * MIB, huge=False)


async def test_a_real_mount_is_bound_and_gone_when_agentd_ends(at: Path) -> None:
    mounts = PlainMounts(HostFs())
    assert await mounts.mount(at, DOMAIN.domain, 8 * MIB, huge=False) == 8 * MIB
    mount = mount_at(HostFs(), at)
    assert mount is not None
    assert wrong_mount(mount, DOMAIN.domain) is None
    assert mount_size(mount) == 8 * MIB
    with (at / "used").open("w"):
        with pytest.raises(LaunchFailed, match="busy"):
            await mounts.unmount(at)
        await mounts.leave(at)
    assert mount_at(HostFs(), at) is None
    await mounts.leave(at)


async def test_a_real_mount_grows_when_nobody_uses_it(at: Path) -> None:
    mounts = PlainMounts(HostFs())
    await mounts.mount(at, DOMAIN.domain, 8 * MIB, huge=False)
    assert await mounts.mount(at, DOMAIN.domain, 16 * MIB, huge=False) == 16 * MIB
    mount = mount_at(HostFs(), at)
    assert mount is not None
    assert mount_size(mount) == 16 * MIB


async def test_a_node_that_is_not_there_cannot_be_mounted_for(at: Path) -> None:
    with pytest.raises(LaunchFailed, match="mount says"):
        await PlainMounts(HostFs()).mount(at, 1023, 8 * MIB, huge=False)
    assert mount_at(HostFs(), at) is None


@pytest.mark.parametrize(
    ("shmem", "page", "size", "huge"),
    [
        ("always within_size [never] deny", 4096, MIB, True),
        ("always within_size never [deny]", 4096, MIB, False),
        ("", 4096, MIB, False),
        ("[always] never deny", 65536, SMALLEST_HUGE_BYTES, True),
        ("[always] never deny", 65536, SMALLEST_HUGE_BYTES - 1, False),
    ],
)
def test_huge_pages_are_asked_for_where_they_help(
    tmp_path: Path, shmem: str, page: int, size: int, huge: bool
) -> None:
    host = write_tree(tmp_path, {SHMEM: shmem} if shmem else {})
    assert use_huge(host, page, [size]) is huge


def test_who_mounts_depends_on_launcher_machine_and_wish(systemd: ScriptedSystemd) -> None:
    units, plain = SystemdMounts(systemd, systemd.host), PlainMounts(systemd.host)
    assert choose_mounts("auto", 4, True, units, None) == (units, "")
    assert choose_mounts("auto", 4, True, None, plain)[1].startswith("the launcher is not systemd")
    assert choose_mounts("auto", 1, True, units, None)[1].startswith("there is one domain")
    assert choose_mounts("always", 1, True, None, plain) == (plain, "")
    assert choose_mounts("always", 1, True, None, None) == (None, "only root may mount")
    assert choose_mounts("always", 1, False, units, plain)[0] is None
    assert choose_mounts("never", 4, True, units, plain)[0] is None
