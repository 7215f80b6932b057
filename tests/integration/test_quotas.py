"""A pool's rate shared by two real controlds, over real NATS and etcd."""

from __future__ import annotations

import asyncio
import bisect
import time
from collections.abc import AsyncIterator

import pytest
from google.rpc import code_pb2, error_details_pb2
from grpc import StatusCode
from grpc.aio import AioRpcError, insecure_channel
from grpc_status import rpc_status

from corefleet.client import Client
from corefleet.errors import InvalidInput
from corefleet.journal import Journal
from corefleet.messages.records import Step
from corefleet.messages.wire import Assignment
from corefleet.rpc import tasks_pb2, tasks_pb2_grpc
from tests.integration.control_plane import POOL, ControlPlane
from tests.integration.fake_node import FakeNode

RATE, BURST = 200.0, 20
LIMITED = f"{POOL}rate_per_s = {RATE}\nburst = {BURST}\n"
TENANTS = f"{POOL}tenant_rate_per_s = 5.0\n"


class Caller:
    """Asks one controld for more than the rate, and keeps when each was let in."""

    def __init__(self, address: str, pool: str) -> None:
        self._address = address
        self._pool = pool
        self._tasks: list[str] = []
        self.taken: list[float] = []
        self.refusals: list[tasks_pb2.Refusal] = []

    async def ask(self, per_s: float, seconds: float) -> None:
        async with Client(self._address) as client:
            async for event in client.submit_many(self._requests(per_s, seconds)):
                if event.HasField("accepted"):
                    self._tasks.append(event.accepted.task)
                else:
                    self.refusals.append(event.refused)
            tasks, self._tasks = self._tasks, []
            for start in range(0, len(tasks), 64):
                found = await asyncio.gather(*map(client.get, tasks[start : start + 64]))
                self.taken += [each.created_ms / 1000 for each in found]

    async def _requests(
        self, per_s: float, seconds: float
    ) -> AsyncIterator[tasks_pb2.SubmitRequest]:
        begun, sent = time.monotonic(), 0
        while (now := time.monotonic()) < begun + seconds:
            for _ in range(int((now - begun) * per_s) - sent):
                sent += 1
                yield Client.request(self._pool, "x")
            await asyncio.sleep(0.01)


def most_in_a_second(times: list[float]) -> int:
    times = sorted(times)
    return max(bisect.bisect_left(times, at + 1.0) - first for first, at in enumerate(times))


async def test_one_busy_controld_uses_all_of_the_rate_and_two_share_it(
    plane: ControlPlane, client: Client
) -> None:
    await client.apply_pool("limited", LIMITED)
    first, second = (Caller(address, "limited") for address in plane.addresses)
    begun = time.time()
    await first.ask(1.5 * RATE, 6.0)
    alone = [at for at in first.taken if begun + 3.0 <= at < begun + 5.0]
    assert len(alone) >= 0.9 * 2 * RATE
    begun = time.time()
    await asyncio.gather(first.ask(1.2 * RATE, 5.0), second.ask(1.2 * RATE, 5.0))
    both = [[at for at in caller.taken if at >= begun + 3.0] for caller in (first, second)]
    assert min(map(len, both)) >= 0.3 * 2 * RATE, "each has about half"
    everything = first.taken + second.taken
    assert most_in_a_second(everything) <= 1.05 * RATE + BURST
    refused = first.refusals + second.refusals
    assert {each.code for each in refused} == {code_pb2.RESOURCE_EXHAUSTED}
    assert all(each.retry_after_ms > 0 for each in refused)
    assert {each.message for each in refused} == {
        "pool limited: over its rate of 200 submissions a second"
    }


async def test_a_limit_in_flight_smaller_than_the_shards_is_kept_and_used_over_both_controlds(
    plane: ControlPlane, client: Client
) -> None:
    most = 0

    async def work(node: FakeNode, assignment: Assignment, journal: Journal) -> str:
        nonlocal most
        most = max(most, len(node.held))
        await journal.append((Step(step=0, kind="tool", attempt=1, node=node.name),))
        return "done"

    await client.apply_pool("few", f"{POOL}max_in_flight = 3\n")
    async with FakeNode(plane.nats.url, "n1", pool="few", run=work):
        requests = [Client.request("few", "x", follow=True) for _ in range(64)]
        finished = 0
        async with asyncio.timeout(60):
            async for event in client.submit_many(requests):
                if event.HasField("event") and event.event.HasField("finished"):
                    finished += 1
    assert finished == 64
    assert 2 <= most <= 3


async def test_a_refusal_of_a_tenant_carries_retry_info(
    plane: ControlPlane, client: Client
) -> None:
    await client.apply_pool("tenants", TENANTS)
    async with insecure_channel(plane.addresses[0]) as channel:
        stub = tasks_pb2_grpc.TasksStub(channel)  # type: ignore[no-untyped-call]

        async def submit_for_ever() -> None:
            while True:
                await stub.Submit(Client.request("tenants", "x", tenant="acme"))

        with pytest.raises(AioRpcError) as caught:
            await asyncio.wait_for(submit_for_ever(), 30)
    assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == (
        "pool tenants: tenant acme is over its rate of 5 submissions a second"
    )
    status = rpc_status.from_call(caught.value)  # type: ignore[arg-type]
    assert status is not None
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert 0 < info.retry_delay.ToMilliseconds() <= 1000
    await client.submit("tenants", "x", tenant="globex")


async def test_a_tenant_that_is_no_name_is_refused_by_field(client: Client) -> None:
    with pytest.raises(InvalidInput, match="tenant"):
        await client.submit("p", "x", tenant="a/b")
