"""Whose turn it is in a shard's queue: shares by weight, a floor for batch, nobody starves."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from controld.core.ready_queue import ReadyQueue
from controld.core.shard_io import WriteRecord
from controld.core.task import Task
from corefleet.messages.records import PoolSpec, TaskRecord
from tests.unit.controld.core.driving import ShardDriver, of_kind

BATCH_EVERY = 20


class Waiting:
    """A queue that is filled by hand and served one placement at a time."""

    def __init__(self, weights: dict[str, int]) -> None:
        self.queue = ReadyQueue(BATCH_EVERY)
        self.queue.set_weights(weights)
        self.count = 0

    def add(self, pool: str, pool_class: str = "online") -> Task:
        self.count += 1
        record = TaskRecord(
            task=f"t{self.count}",
            pool=pool,
            session=f"s{self.count}",
            request_id="r",
            input="",
            pool_class=pool_class,  # type: ignore[arg-type]
        )
        task = Task(record, self.count)
        self.queue.add(task)
        return task

    def place(self) -> Task | None:
        pool = self.queue.next_pool()
        if pool is None:
            return None
        task = self.queue.peek(pool)
        assert task is not None
        self.queue.serve(pool)
        return task


pools = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.integers(1, 5), st.sampled_from(["online", "batch"]), st.integers(0, 12)),
    min_size=1,
)


@given(pools)
@settings(max_examples=60, deadline=None)
def test_every_ready_task_is_placed_within_a_bound_of_rounds(
    mix: dict[str, tuple[int, str, int]],
) -> None:
    """While others are refilled for ever, a task waits for its turns and no longer."""
    waiting = Waiting({name: weight for name, (weight, _, _) in mix.items()})
    bounds: dict[str, int] = {}
    online = sum(weight for weight, kind, _ in mix.values() if kind == "online")
    batch = sum(weight for weight, kind, _ in mix.values() if kind == "batch")
    for name, (weight, kind, ahead) in mix.items():
        last = [waiting.add(name, kind) for _ in range(ahead + 1)][-1]
        waiting.add(name, kind)
        turns = -(-(ahead + 1) // weight) + 1
        if kind == "online":
            bounds[last.id] = turns * online * BATCH_EVERY // (BATCH_EVERY - 1) + 2
        else:
            bounds[last.id] = turns * batch * (BATCH_EVERY if online else 1) + BATCH_EVERY
    for number in range(1, max(bounds.values()) + 1):
        placed = waiting.place()
        assert placed is not None
        waiting.add(placed.record.pool, placed.record.pool_class)
        if number > bounds.pop(placed.id, number):
            raise AssertionError(f"{placed.id} of {mix} placed only as number {number}")
    assert bounds == {}


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6))
@settings(max_examples=50, deadline=None)
def test_shares_of_pools_that_always_wait_are_their_weights(weights: list[int]) -> None:
    waiting = Waiting({f"p{n}": weight for n, weight in enumerate(weights)})
    rounds = 5
    for n in range(len(weights)):
        for _ in range(10 * rounds):
            waiting.add(f"p{n}")
    placed = Counter[str]()
    for _ in range(rounds * sum(weights)):
        task = waiting.place()
        assert task is not None
        placed[task.record.pool] += 1
    assert placed == {f"p{n}": rounds * weight for n, weight in enumerate(weights)}


def test_a_weight_changes_while_pools_wait() -> None:
    waiting = Waiting({})
    for pool in ("a", "b"):
        for _ in range(40):
            waiting.add(pool)
    first = Counter(task.record.pool for _ in range(20) if (task := waiting.place()))
    assert first == {"a": 10, "b": 10}
    waiting.queue.set_weights({"a": 3})
    then = Counter(task.record.pool for _ in range(20) if (task := waiting.place()))
    assert then == {"a": 15, "b": 5}


def test_batch_has_its_floor_while_online_waits_and_all_that_online_leaves() -> None:
    waiting = Waiting({})
    for _ in range(95):
        waiting.add("chat")
    for _ in range(15):
        waiting.add("crunch", "batch")
    first = [task.record.pool for _ in range(100) if (task := waiting.place())]
    assert [n for n, pool in enumerate(first, 1) if pool == "crunch"] == [20, 40, 60, 80, 100]
    rest = [task.record.pool for _ in range(10) if (task := waiting.place())]
    assert rest == ["crunch"] * 10
    assert waiting.place() is None


def test_batch_that_comes_late_has_saved_nothing_up() -> None:
    waiting = Waiting({})
    for _ in range(60):
        waiting.add("chat")
    for _ in range(40):
        waiting.place()
    waiting.add("crunch", "batch")
    left = [task.record.pool for _ in range(20) if (task := waiting.place())]
    assert left.index("crunch") == 19


def test_batch_that_finds_no_place_does_not_hold_up_online() -> None:
    shard = ShardDriver(nodes=0)
    for _ in range(60):
        shard.submit(pool="chat")
    for _ in range(3):
        shard.submit(pool="crunch", pool_class="batch")
    shard.fleets.join("n0", slots=60)
    shard.fleet.set_pools({"crunch": PoolSpec(name="crunch", labels={"big": "yes"})})
    placed = [write.record.pool for write in of_kind(shard.wait(0.3), WriteRecord)]
    assert placed == ["chat"] * 60
