"""Replicas with real fillers, bound by the plain launcher, on a real bound tmpfs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from agentd.filler.app import Order
from agentd.filler.mounted import mount_at
from agentd.filler.record import part_path, read_verified
from agentd.filler.run import FILLER_KIND, Fillers, Room, Source, sources_of
from agentd.hostfs import HostFs
from agentd.launch import LaunchSpec, PlainLauncher, Process
from agentd.launch.protocol import ServiceClass
from agentd.replica_mounts import Mounts, PlainMounts
from agentd.replicas import ModelReplicas
from corefleet.background import Background
from corefleet.clock import SystemClock
from corefleet.config import ModelConfig
from corefleet.errors import LaunchFailed
from tests.unit.agentd.replica_mounting import (
    DOMAIN,
    MIB,
    model_at,
    unmount_all,
    why_no_mounts,
)

ROOM = {DOMAIN.domain: Room(DOMAIN.cpus, 32 * MIB)}
Make = Callable[..., Awaitable[ModelReplicas]]


class Recording:
    """A launcher that keeps the processes that it started."""

    def __init__(self, launcher: PlainLauncher) -> None:
        self.launcher = launcher
        self.started: list[Process] = []
        self.came = asyncio.Event()

    async def start(self, spec: LaunchSpec) -> Process:
        process = await self.launcher.start(spec)
        self.started.append(process)
        self.came.set()
        return process

    async def adopt(self) -> tuple[Process, ...]:
        return ()

    async def groups(self, domain: int) -> dict[ServiceClass, str]:
        return {}

    async def squeeze(self, domain: int, cpus: float | None) -> None:
        return

    async def close(self) -> None:
        await self.launcher.close()

    @property
    def outlives(self) -> bool:
        return False

    @property
    def unisolated(self) -> tuple[str, ...]:
        return ()


class Lasting(PlainMounts):
    """Mounts that stay for the next agentd, as systemd's do."""

    async def leave(self, at: Path) -> None:
        return


class NoMounts(PlainMounts):
    """A machine that may not mount after all."""

    async def make(self, at: Path, options: str) -> None:
        raise LaunchFailed(f"{at}: mount says: permission denied")


@pytest.fixture
def errors() -> list[BaseException]:
    return []


@pytest.fixture
async def launcher() -> Recording:
    found = await PlainLauncher.find(HostFs(), DOMAIN.cpus, DOMAIN.domain, require_numa=False)
    return Recording(found)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return model_at(tmp_path / "model.gguf")


@pytest.fixture
async def make(
    tmp_path: Path, launcher: Recording, errors: list[BaseException]
) -> AsyncIterator[Make]:
    made: list[ModelReplicas] = []
    background = Background(errors.append)

    async def begin(
        models: dict[str, Source],
        mounts: Mounts | None = None,
        why_not: str = "",
        must: bool = False,
        left: tuple[Process, ...] = (),
    ) -> ModelReplicas:
        replicas = ModelReplicas(
            models=models,
            rooms=ROOM,
            directory=tmp_path / "models",
            launcher=launcher,
            mounts=mounts,
            why_not=why_not,
            must=must,
            host=HostFs(),
            clock=SystemClock(),
            background=background,
            log_dir=tmp_path / "log",
        )
        made.append(replicas)
        await replicas.start(left)
        return replicas

    yield begin
    for replicas in made:
        await replicas.close()
    await background.close()
    unmount_all(tmp_path / "models" / f"d{DOMAIN.domain}")
    assert errors == []


@pytest.fixture
def may_mount() -> None:
    if why_no_mounts():
        pytest.skip(why_no_mounts())


@pytest.mark.usefixtures("may_mount")
async def test_callers_at_the_same_time_share_one_fill(
    make: Make, launcher: Recording, source: Source
) -> None:
    replicas = await make({"small": source}, PlainMounts(HostFs()))
    paths = await asyncio.gather(*(replicas.ensure("small", DOMAIN.domain) for _ in range(3)))
    assert len(launcher.started) == 1
    assert len(set(paths)) == 1
    assert paths[0] != source.path
    assert paths[0].read_bytes() == source.path.read_bytes()
    assert read_verified(paths[0], source.sha256, source.size_bytes) is not None
    (state,) = replicas.states()
    assert (state.state, state.bytes, state.why) == ("ready", source.size_bytes, "")


async def test_their_directory_is_there_before_anything_is_mounted(
    make: Make, source: Source, tmp_path: Path
) -> None:
    await make({"small": source}, PlainMounts(HostFs()))
    assert (tmp_path / "models").is_dir()


@pytest.mark.usefixtures("may_mount")
async def test_the_filler_is_bound_to_the_domain_and_has_no_memory_limit(
    make: Make, launcher: Recording, source: Source
) -> None:
    replicas = await make({"small": source}, PlainMounts(HostFs()))
    await replicas.ensure("small", DOMAIN.domain)
    spec = launcher.started[0].spec
    assert (spec.kind, spec.domain, spec.cpus) == (FILLER_KIND, DOMAIN.domain, DOMAIN.cpus)
    assert (spec.service_class, spec.unit, spec.memory_max) == ("engine", "small", 0)
    assert (
        spec.command[3:]
        == Order(
            model="small",
            source=source.path,
            target=replicas.target("small", DOMAIN.domain),
            size_bytes=source.size_bytes,
            sha256=source.sha256,
            domain=DOMAIN.domain,
            cpus=spec.command[-1],
        ).command()[1:]
    )


@pytest.mark.usefixtures("may_mount")
async def test_the_next_agentd_uses_what_is_right_and_removes_the_rest(
    make: Make, launcher: Recording, source: Source
) -> None:
    first = await make({"small": source}, Lasting(HostFs()))
    path = await first.ensure("small", DOMAIN.domain)
    inode = path.stat().st_ino
    (path.parent / ".old.part").write_bytes(b"left")
    await first.close()
    second = await make({"small": source}, Lasting(HostFs()))
    assert await second.ensure("small", DOMAIN.domain) == path
    assert path.stat().st_ino == inode
    assert len(launcher.started) == 1
    assert not (path.parent / ".old.part").exists()


@pytest.mark.usefixtures("may_mount")
async def test_nothing_stays_mounted_when_agentd_ends_without_systemd(
    make: Make, source: Source
) -> None:
    replicas = await make({"small": source}, PlainMounts(HostFs()))
    path = await replicas.ensure("small", DOMAIN.domain)
    with path.open("rb"):
        await replicas.close()
        assert mount_at(HostFs(), path.parent) is None
    with pytest.raises(LaunchFailed, match="agentd is stopping"):
        await replicas.ensure("small", DOMAIN.domain)


@pytest.mark.usefixtures("may_mount")
async def test_a_model_that_is_not_used_gives_way_to_one_that_is_wanted(
    make: Make, tmp_path: Path
) -> None:
    models = {
        name: model_at(tmp_path / f"{name}.gguf", size=12 * MIB, seed=number)
        for number, name in enumerate(("one", "two", "three"))
    }
    replicas = await make(models, PlainMounts(HostFs()))
    one = await replicas.ensure("one", DOMAIN.domain)
    replicas.note_engine("one", DOMAIN.domain, True)
    two = await replicas.ensure("two", DOMAIN.domain)
    replicas.note_engine("two", DOMAIN.domain, True)
    waiting = asyncio.create_task(replicas.ensure("three", DOMAIN.domain))
    await asyncio.sleep(0)
    replicas.note_engine("two", DOMAIN.domain, False)
    assert (await waiting).exists()
    assert one.exists()
    assert not two.exists()


@pytest.mark.usefixtures("may_mount")
async def test_a_source_with_another_checksum_starts_no_engine_and_leaves_nothing(
    make: Make, tmp_path: Path
) -> None:
    good = model_at(tmp_path / "model.gguf")
    wrong = Source(good.path, good.size_bytes, "0" * 64)
    replicas = await make({"small": wrong}, PlainMounts(HostFs()))
    with pytest.raises(LaunchFailed, match=r"expected \d+ with 000000"):
        await replicas.ensure("small", DOMAIN.domain)
    left = [p for p in (tmp_path / "models" / f"d{DOMAIN.domain}").iterdir() if p.stat().st_size]
    assert left == []


@pytest.mark.usefixtures("may_mount")
async def test_a_filler_that_is_killed_half_way_is_started_again(
    make: Make, launcher: Recording, tmp_path: Path
) -> None:
    source = model_at(tmp_path / "model.gguf", size=24 * MIB)
    replicas = await make({"small": source}, PlainMounts(HostFs()))
    waiting = asyncio.create_task(replicas.ensure("small", DOMAIN.domain))
    await launcher.came.wait()
    os.kill(launcher.started[0].pid, signal.SIGKILL)
    path = await waiting
    assert path == replicas.target("small", DOMAIN.domain)
    assert len(launcher.started) == 2
    assert path.read_bytes() == source.path.read_bytes()
    assert not part_path(path).exists()


@pytest.mark.usefixtures("may_mount")
async def test_a_mount_that_was_taken_away_is_made_and_filled_again(
    make: Make, launcher: Recording, source: Source
) -> None:
    replicas = await make({"small": source}, PlainMounts(HostFs()))
    path = await replicas.ensure("small", DOMAIN.domain)
    await asyncio.to_thread(unmount_all, path.parent)
    assert await replicas.ensure("small", DOMAIN.domain) == path
    assert len(launcher.started) == 2
    assert mount_at(HostFs(), path.parent) is not None
    assert path.exists()


@pytest.mark.usefixtures("may_mount")
async def test_a_caller_that_gives_up_does_not_stop_the_fill_of_another(
    make: Make, launcher: Recording, source: Source
) -> None:
    replicas = await make({"small": source}, PlainMounts(HostFs()))
    first = asyncio.create_task(replicas.ensure("small", DOMAIN.domain))
    second = asyncio.create_task(replicas.ensure("small", DOMAIN.domain))
    await launcher.came.wait()
    first.cancel()
    assert (await second).exists()
    assert len(launcher.started) == 1


@pytest.mark.usefixtures("may_mount")
async def test_closing_ends_the_filler_and_tells_who_waits(
    make: Make, launcher: Recording, tmp_path: Path
) -> None:
    source = model_at(tmp_path / "model.gguf", size=24 * MIB)
    replicas = await make({"small": source}, PlainMounts(HostFs()))
    waiting = asyncio.create_task(replicas.ensure("small", DOMAIN.domain))
    await launcher.came.wait()
    await replicas.close()
    with pytest.raises(LaunchFailed, match="agentd is stopping"):
        await waiting
    assert mount_at(HostFs(), replicas.target("small", DOMAIN.domain).parent) is None


async def test_a_filler_that_an_earlier_agentd_left_is_ended(
    make: Make, launcher: Recording, source: Source
) -> None:
    spec = LaunchSpec(
        name="left",
        command=(sys.executable, "-c", "import time; time.sleep(600)"),
        cpus=DOMAIN.cpus,
        domain=DOMAIN.domain,
        kind=FILLER_KIND,
    )
    process = await launcher.start(spec)
    await make({"small": source}, None, "no root", left=(process,))
    assert (await process.wait()).signal == signal.SIGKILL


async def test_without_a_way_to_mount_engines_map_the_source_and_one_line_says_so(
    make: Make, launcher: Recording, source: Source
) -> None:
    replicas = await make({"small": source}, None, "the launcher is not systemd")
    assert await replicas.ensure("small", DOMAIN.domain) == source.path
    assert replicas.unisolated == (
        "models have no replica per domain: the launcher is not systemd",
    )
    (state,) = replicas.states()
    assert (state.state, state.why) == ("direct", "the launcher is not systemd")
    assert launcher.started == []


async def test_where_replicas_are_required_no_engine_is_started_without_one(
    make: Make, source: Source
) -> None:
    replicas = await make({"small": source}, NoMounts(HostFs()), must=True)
    with pytest.raises(LaunchFailed, match="permission denied"):
        await replicas.ensure("small", DOMAIN.domain)


async def test_a_mount_that_is_not_permitted_lets_engines_map_the_source(
    make: Make, source: Source
) -> None:
    replicas = await make({"small": source}, NoMounts(HostFs()))
    assert await replicas.ensure("small", DOMAIN.domain) == source.path


async def test_a_model_that_nobody_knows_is_an_error(make: Make, source: Source) -> None:
    replicas = await make({"small": source})
    with pytest.raises(LaunchFailed, match="model other: not known; known are: small"):
        await replicas.ensure("other", DOMAIN.domain)


def test_sources_take_their_digest_from_the_list_of_models(tmp_path: Path) -> None:
    config = ModelConfig(size_bytes=7, sha256="ab", file="m.gguf", sources=())
    path = tmp_path / "m.gguf"
    assert sources_of({"m": path}, {"m": config, "n": config}) == {"m": Source(path, 7, "ab")}


async def test_a_fill_that_cannot_be_launched_says_why(
    launcher: Recording, source: Source, tmp_path: Path
) -> None:
    fillers = Fillers(launcher, tmp_path / "log")
    failed = await fillers.fill("small", source, tmp_path / "small", DOMAIN.domain, (4095,))
    assert failed is not None
    assert "4095" in failed.why or "physcpubind" in failed.why or "ended at once" in failed.why
