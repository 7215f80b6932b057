"""One copy of each model in each domain's memory, which all engines of that domain map."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import structlog

from agentd.core.replicas import Replicas
from agentd.core.replicas_io import (
    Action,
    Direct,
    DomainLost,
    EngineEnded,
    EngineStarted,
    Event,
    Evicted,
    Fill,
    Filled,
    Found,
    Mount,
    Mounted,
    MountFailed,
    Place,
    Ready,
    Refused,
    Remove,
    ReplicaState,
    Unwanted,
    Wanted,
)
from agentd.filler.mounted import mount_at, mount_size, wrong_mount
from agentd.filler.record import clear
from agentd.filler.run import Fillers, Room, Source, replica_path, sweep
from agentd.hostfs import HostFs
from agentd.launch.protocol import Launcher, Process
from agentd.replica_mounts import Mounts, use_huge
from corefleet.background import Background
from corefleet.clock import Clock
from corefleet.errors import LaunchFailed

_log = structlog.get_logger(__name__)


class ModelReplicas:
    """The shell around the core of replicas: mounts, fills, removes, answers.

    `directory` is `run_dir`/models. `mounts` None, with the reason in `why_not`: engines map
    the source files; with `must` none is started then. `log_dir` takes the fillers' logs.
    """

    def __init__(
        self,
        *,
        models: Mapping[str, Source],
        rooms: Mapping[int, Room],
        directory: Path,
        launcher: Launcher,
        mounts: Mounts | None,
        why_not: str,
        must: bool,
        host: HostFs,
        clock: Clock,
        background: Background,
        log_dir: Path,
    ) -> None:
        self._models = models
        self._rooms = rooms
        self._directory = directory
        self._fillers = Fillers(launcher, log_dir)
        self._mounts = mounts
        self._why_not = "" if mounts is not None else why_not or "no way to mount is known"
        self._host = host
        self._clock = clock
        self._background = background
        budgets = {domain: room.budget_bytes for domain, room in rooms.items()}
        self._core = Replicas(budgets, self._why_not, must)
        self._waiting: dict[Place, set[asyncio.Future[Path]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._mounted: set[int] = set()
        self._told: dict[Place, str] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def unisolated(self) -> tuple[str, ...]:
        """One line when no domain has replicas."""
        if not self._why_not or not self._models:
            return ()
        return (f"models have no replica per domain: {self._why_not}",)

    async def start(self, left: tuple[Process, ...] = ()) -> None:
        """Use what an earlier agentd left: right replicas stay, all else is removed.

        `left` are its fillers that still run (adopted processes of kind `filler`): they are
        ended. Call it once, before `ensure`.
        """
        for process in left:
            process.kill()
            await process.wait()
        if self._mounts is None:
            return
        await asyncio.to_thread(self._make_directory)
        for domain in self._rooms:
            found = await asyncio.to_thread(self._look, domain)
            if found is None:
                continue
            size, models = found
            room = self._rooms[domain].budget_bytes
            self._mounted.add(domain)
            if size < room and not models:
                # Empty: it is mounted again as large as it should be, when it is needed.
                continue
            self._feed(Mounted(domain, min(size, room)))
            for name in models:
                self._feed(Found(domain, name, self._models[name].size_bytes))
            _log.info("Replicas adopted", domain=domain, models=sorted(models))

    async def ensure(self, model: str, domain: int) -> Path:
        """Return the file that an engine of `model` in `domain` is to map.

        The replica, filled and verified first if need be (seconds to minutes), or the source
        where there can be none. Concurrent callers share one fill. Raises LaunchFailed when
        the model is not known, or no engine may be started without a replica.
        """
        source = self._models.get(model)
        if source is None:
            known = ", ".join(sorted(self._models)) or "none"
            raise LaunchFailed(f"model {model}: not known; known are: {known}")
        if domain in self._mounted and not await asyncio.to_thread(self._still_there, domain):
            self._mounted.discard(domain)
            self._feed(DomainLost(domain))
        if self._closed:
            raise LaunchFailed(f"model {model}: agentd is stopping")
        place = Place(domain, model)
        answer: asyncio.Future[Path] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(place, set()).add(answer)
        self._feed(Wanted(domain, model, source.size_bytes))
        try:
            return await answer
        finally:
            waiting = self._waiting.get(place)
            if waiting is not None:
                waiting.discard(answer)
                if not waiting:
                    del self._waiting[place]
                    self._feed(Unwanted(domain, model))

    def note_engine(self, model: str, domain: int, started: bool) -> None:
        """An engine was started or adopted, or has ended. Models of engines are not evicted."""
        self._feed(EngineStarted(domain, model) if started else EngineEnded(domain, model))

    def states(self) -> tuple[ReplicaState, ...]:
        """Return each model that was asked for: where, in what state, why, for how many."""
        return self._core.states()

    async def close(self) -> None:
        """End fillers; unmount what does not outlive agentd. Idempotent.

        Call it when the engines have ended.
        """
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        for waiting in self._waiting.values():
            for answer in waiting:
                if not answer.done():
                    answer.set_exception(LaunchFailed("agentd is stopping"))
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._mounts is not None:
            for domain in self._rooms:
                await self._mounts.leave(self._at(domain))

    def target(self, model: str, domain: int) -> Path:
        """Return where the replica of a model lies."""
        return replica_path(self._at(domain), model, self._models[model])

    def _at(self, domain: int) -> Path:
        return self._directory / f"d{domain}"

    # The core's view, and its will.

    def _feed(self, event: Event) -> None:
        if self._closed:
            return
        self._do(self._core.handle(event, self._clock.monotonic()))
        self._set_alarm()

    def _tick(self) -> None:
        self._alarm = None
        self._do(self._core.tick(self._clock.monotonic()))
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        now = self._clock.monotonic()
        due = self._core.next_due(now)
        if due is not None:
            pause = max(0.001, due - now)
            self._alarm = asyncio.get_running_loop().call_later(pause, self._tick)

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Mount(domain=domain, size=size):
                    self._spawn(self._mount(domain, size), f"mount models of {domain}")
                case Fill(domain=domain, model=model):
                    self._spawn(self._fill(domain, model), f"fill {model} in {domain}")
                case Remove(domain=domain, model=model):
                    self._spawn(self._remove(domain, model), f"remove {model} in {domain}")
                case Ready(domain=domain, model=model):
                    self._told.pop(Place(domain, model), None)
                    self._answer(Place(domain, model), self.target(model, domain))
                case Direct(domain=domain, model=model, why=why):
                    self._tell(Place(domain, model), why)
                    self._answer(Place(domain, model), self._models[model].path)
                case Refused(domain=domain, model=model, why=why):
                    text = f"model {model}: domain {domain} has no replica of it: {why}"
                    self._answer(Place(domain, model), LaunchFailed(text))

    def _answer(self, place: Place, answer: Path | LaunchFailed) -> None:
        for waiting in self._waiting.pop(place, ()):
            if waiting.done():
                continue
            if isinstance(answer, Path):
                waiting.set_result(answer)
            else:
                waiting.set_exception(answer)

    def _tell(self, place: Place, why: str) -> None:
        """Warn once of each reason; that of the whole node is said in `unisolated`."""
        if why != self._why_not and self._told.get(place) != why:
            self._told[place] = why
            _log.warning(
                "Engines map the model where it lies, not a replica",
                model=place.model,
                domain=place.domain,
                reason=why,
            )

    # What takes time.

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._background.spawn(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _mount(self, domain: int, size: int) -> None:
        at = self._at(domain)
        sizes = [source.size_bytes for source in self._models.values()]
        huge = use_huge(self._host, self._host.page_bytes or 0, sizes)
        assert self._mounts is not None
        try:
            room = await self._mounts.mount(at, domain, size, huge)
        except LaunchFailed as error:
            _log.warning("No place for models", domain=domain, reason=str(error))
            self._feed(MountFailed(domain, str(error)))
            return
        self._mounted.add(domain)
        self._feed(Mounted(domain, room))

    async def _fill(self, domain: int, model: str) -> None:
        source, target = self._models[model], self.target(model, domain)
        started = self._clock.monotonic()
        cpus = self._rooms[domain].cpus
        failed = await self._fillers.fill(model, source, target, domain, cpus)
        if failed is not None:
            _log.warning("A replica was not made", model=model, domain=domain, reason=failed.why)
            self._feed(failed)
            return
        seconds = round(self._clock.monotonic() - started, 1)
        size = source.size_bytes
        _log.info("Replica made", model=model, domain=domain, bytes=size, seconds=seconds)
        self._feed(Filled(domain, model))

    async def _remove(self, domain: int, model: str) -> None:
        try:
            await asyncio.to_thread(clear, self.target(model, domain))
        except OSError as error:
            # It goes on counting against the budget.
            _log.error("A replica stays", model=model, domain=domain, reason=str(error))
            return
        _log.info("Replica removed", model=model, domain=domain)
        self._feed(Evicted(domain, model))

    # What lies there. These block.

    def _make_directory(self) -> None:
        """Units that start before the first mount can only be kept out of what is there."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            _log.warning("No place for models", at=str(self._directory), reason=str(error))

    def _still_there(self, domain: int) -> bool:
        return wrong_mount(mount_at(self._host, self._at(domain)), domain) is None

    def _look(self, domain: int) -> tuple[int, list[str]] | None:
        """Return the mount's size and the models that lie there right; remove all else."""
        at = self._at(domain)
        mount = mount_at(self._host, at)
        if mount is None or wrong_mount(mount, domain) is not None:
            return None
        return mount_size(mount), sweep(at, domain, self._models)
