"""The processes of a run, started, ended and started again, under the eyes of the properties."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from controld.core.shard_io import Action, EndTask, SendAssignment, WriteRecord
from controld.runner import ShardRunner
from corefleet.bus import Stored
from corefleet.messages.records import PoolSpec
from corefleet.store import Change
from tests.sim.controld import SimControld
from tests.sim.loop import Process
from tests.sim.node import SimNode
from tests.sim.plan import POOLS, Plan
from tests.sim.properties import Properties, Violation
from tests.sim.surroundings import Surroundings
from tests.sim.wires import drawn

RESTART_S = (0.3, 1.0)


class SimFleet(Surroundings):
    """The cluster of one plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.pools = pools_of(plan)
        self.properties = Properties(plan, self.pools)
        self.controlds: dict[str, SimControld] = {}
        self.nodes: dict[str, SimNode] = {}
        self.violation: Violation | None = None
        """The first one found where it could not be raised."""
        self._offsets: dict[str, int] = {}
        self._rng = self.rng("fleet")

    # What processes tell.

    def committed(self, process: Process, messages: Sequence[Stored]) -> None:
        for stored in messages:
            digest = hashlib.blake2b(stored.payload, digest_size=6).hexdigest()
            self.note("stored", process.name, stored.sequence, stored.subject, digest)
        self.properties.committed(self.now, process, messages)

    def changed(self, changes: tuple[Change, ...]) -> None:
        for change in changes:
            what = "gone" if change.value is None else change.value.hex()[:80]
            self.note("etcd", change.mod_revision, change.key, what)
        self.properties.stored(changes)

    def failed(self, process: Process, message: str, error: BaseException | None) -> None:
        if isinstance(error, Violation):
            self.violation = self.violation or error
        else:
            self.wrong(f"{process.name}: {message}: {error!r}")

    def wrong(self, what: str) -> None:
        self.violation = self.violation or Violation(f"defect: {what}")

    def serves(self, controld: str) -> None:
        self.properties.controld_started(self.now)

    def process_ended(self, process: Process) -> None:
        found = self.find(process.name)
        if found is not None and found.process is process:
            self.note("ended", process.name)
            found.gone()
            self.after(drawn(self._rng, *RESTART_S), self.start_again, process.name)

    def living(self, name: str) -> Process | None:
        found = self.find(name)
        return found.process if found is not None else None

    def decides(self, runner: ShardRunner, action: Action) -> None:
        """A shard's core decided on `action`."""
        if isinstance(action, WriteRecord | EndTask | SendAssignment) and self.current is not None:
            self.properties.decides(
                self.current.name, runner.shard, runner.epoch, type(action).__name__
            )

    # Processes.

    def find(self, name: str) -> SimControld | SimNode | None:
        """Return the living process of that name."""
        found: SimControld | SimNode | None = self.controlds.get(name) or self.nodes.get(name)
        return found if found is not None and found.process.alive else None

    def start_controld(self, name: str) -> None:
        self.starts += 1
        self.note("start", name)
        made = self.controlds[name] = SimControld(self, name)
        made.process.wall_offset_ms = self._offsets.get(name, 0)

    def start_node(self, name: str) -> None:
        self.starts += 1
        self.note("start", name)
        made = self.nodes[name] = SimNode(self, name)
        made.process.wall_offset_ms = self._offsets.get(name, 0)

    def start_again(self, name: str) -> None:
        """Start what was there before, unless somebody else did."""
        if self.find(name) is None:
            if name in self.controlds:
                self.start_controld(name)
            else:
                self.start_node(name)

    def step_clock(self, name: str, by_s: float) -> None:
        """Set a machine's wall clock forward or back, for good."""
        self._offsets[name] = self._offsets.get(name, 0) + int(by_s * 1000)
        found = self.find(name)
        if found is not None:
            found.process.wall_offset_ms = self._offsets[name]

    def close(self) -> None:
        """Let go of all processes."""
        living = [each.process for each in self.controlds.values()]
        living += [each.process for each in self.nodes.values()]
        self.bury([*dict.fromkeys([*self.buried, *living])])


def pools_of(plan: Plan) -> tuple[PoolSpec, ...]:
    """Return the pools of a run: two online ones, one of them with a quota, and one batch."""
    return tuple(
        PoolSpec(
            name=name,
            agent="sim:Agent",
            pool_class="batch" if name == "night" else "online",
            slots=plan.sizes.slots,
            progress_timeout_s=4.0,
            max_attempts=60,
            rate_per_s=4.0 if name == "code" else 0.0,
            burst=6 if name == "code" else 0,
        )
        for name in POOLS
    )
