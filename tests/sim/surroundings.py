"""What simulated controlds and nodes stand in, and whom they tell of their end."""

from __future__ import annotations

from collections.abc import Sequence

from corefleet.bus import Stored
from corefleet.store import Change
from tests.sim.etcd import EtcdServer
from tests.sim.loop import START_S, Process, World
from tests.sim.nats import NatsServer
from tests.sim.plan import Plan
from tests.sim.streams import StreamServer
from tests.sim.wires import Wires


class Surroundings(World):
    """Time, servers and networks of one run; those who run it override what is told."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.seed)
        self.plan = plan
        self.starts = 0
        """Processes started so far: each start has its own chance."""
        self.trace: list[str] = []
        self.wires = Wires(self)
        self.nats = NatsServer(self)
        self.streams = StreamServer(self, self.committed)
        self.etcd = EtcdServer(self, self.changed)

    def note(self, what: str, *more: object) -> None:
        """Add a line to the trace."""
        rest = " ".join(str(each) for each in more)
        self.trace.append(f"{self.now - START_S:9.4f} {what} {rest}")

    def committed(self, process: Process, messages: Sequence[Stored]) -> None:
        """Messages of `process` were stored in a stream."""
        raise NotImplementedError

    def changed(self, changes: tuple[Change, ...]) -> None:
        """Keys of the store changed."""
        raise NotImplementedError

    def wrong(self, what: str) -> None:
        """Something in a process is not as it has to be."""
        raise NotImplementedError

    def serves(self, controld: str) -> None:
        """A controld has started."""
        raise NotImplementedError

    def living(self, name: str) -> Process | None:
        """Return the living process of that name."""
        raise NotImplementedError

    def process_ended(self, process: Process) -> None:
        """A process has ended by itself."""
        raise NotImplementedError
