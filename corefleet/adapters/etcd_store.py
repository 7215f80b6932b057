"""The store on etcd, by gRPC."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from typing import Any

import structlog
from etcd.api.etcdserverpb import rpc_pb2

from corefleet.adapters import etcd_lease
from corefleet.adapters.etcd_endpoints import WITH_LEADER, Compacted, Endpoint, Endpoints
from corefleet.adapters.etcd_lease import EtcdLease
from corefleet.adapters.etcd_watch import EtcdWatch, range_end, range_start
from corefleet.clock import Clock, SystemClock
from corefleet.config import EtcdConfig
from corefleet.errors import Incompatible, InvalidInput
from corefleet.store import Committed, Compare, Delete, KeyValue, Put
from corefleet.tls import TlsFiles

OLDEST = (3, 4)
"""Oldest server that can be used: progress of watches and lease checkpoints."""
PAGE = 500
"""Keys of one page of a range: a page must not hold up the event loop."""
PASSES = 3
"""How often a range is begun again because its revision was compacted meanwhile."""

log = structlog.get_logger(__name__)


class EtcdStore:
    """Implements corefleet.store.Store. Made by `connect`."""

    def __init__(self, endpoints: Endpoints, clock: Clock) -> None:
        self._endpoints = endpoints
        self._clock = clock
        self._leases: set[EtcdLease] = set()
        self._watches: set[EtcdWatch] = set()

    @classmethod
    async def connect(cls, config: EtcdConfig, clock: Clock | None = None) -> EtcdStore:
        """Connect to the first member that answers.

        `clock` is what `valid_until()` of leases is measured by, the machine's by default.
        Raises Unavailable within `config.timeout_s`, and Incompatible for a server older
        than 3.4; ConfigError for certificates that cannot be used.
        """
        endpoints = Endpoints(config.endpoints, config.timeout_s, TlsFiles.of(config.tls))
        try:
            version = await _server_version(endpoints)
        except BaseException:  # whatever went wrong, nobody else can close the channels
            await endpoints.close()
            raise
        log.info("connected to etcd", version=version, endpoints=config.endpoints)
        return cls(endpoints, clock or SystemClock())

    async def get(self, key: str) -> KeyValue | None:
        request = rpc_pb2.RangeRequest(key=key.encode())
        answer = await self._read(request)
        return _key_value(answer.kvs[0]) if answer.kvs else None

    async def range(self, prefix: str) -> tuple[list[KeyValue], int]:
        for _ in range(PASSES):
            try:
                return await self._pages(prefix)
            except Compacted as error:
                compacted = error
        raise compacted

    async def _pages(self, prefix: str) -> tuple[list[KeyValue], int]:
        """Read a range page by page, all at the first page's revision; raises Compacted."""
        found: list[KeyValue] = []
        start, end, revision = range_start(prefix), range_end(prefix), 0
        while True:
            request = rpc_pb2.RangeRequest(key=start, range_end=end, limit=PAGE, revision=revision)
            answer = await self._read(request)
            revision = revision or answer.header.revision
            found += [_key_value(kv) for kv in answer.kvs]
            if not answer.more:
                return found, revision
            start = answer.kvs[-1].key + b"\0"

    async def put(self, key: str, value: bytes, lease: int = 0) -> int:
        request = rpc_pb2.PutRequest(key=key.encode(), value=value, lease=lease)

        async def send(member: Endpoint, timeout: float) -> Any:
            return await member.kv.Put(request, timeout=timeout, metadata=WITH_LEADER)

        answer = await self._endpoints.call("put", send, repeat=False)
        revision: int = answer.header.revision
        return revision

    async def delete(self, key: str) -> bool:
        request = rpc_pb2.DeleteRangeRequest(key=key.encode())

        async def send(member: Endpoint, timeout: float) -> Any:
            return await member.kv.DeleteRange(request, timeout=timeout, metadata=WITH_LEADER)

        answer = await self._endpoints.call("delete", send, repeat=False)
        return bool(answer.deleted)

    async def commit(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> Committed:
        request = rpc_pb2.TxnRequest(
            compare=[_compare(compare) for compare in compares],
            success=[_operation(operation) for operation in operations],
        )

        async def send(member: Endpoint, timeout: float) -> Any:
            return await member.kv.Txn(request, timeout=timeout, metadata=WITH_LEADER)

        answer = await self._endpoints.call("commit", send, repeat=False)
        return Committed(answer.succeeded, answer.header.revision)

    async def lease(self, ttl_s: float) -> EtcdLease:
        """Grant a lease and keep it alive.

        etcd counts whole seconds and has a minimum: what was granted is never shorter
        than `ttl_s`. `lost()` also returns when the store is closed.
        """
        if ttl_s <= 0:
            raise InvalidInput("ttl_s", ttl_s, "seconds above 0")
        lease = await etcd_lease.grant(self._endpoints, self._clock, math.ceil(ttl_s))
        self._leases = {each for each in self._leases if not each.ended} | {lease}
        return lease

    def watch(self, prefix: str, start: int) -> EtcdWatch:
        """Yield what changes under `prefix` from revision `start` on; 0 is from now on.

        The iterator ends after a Resync, by its `aclose()`, and when the store is closed.
        """
        watch = EtcdWatch(self._endpoints, prefix, start)
        self._watches = {each for each in self._watches if not each.ended} | {watch}
        return watch

    async def close(self) -> None:
        await asyncio.gather(
            *(watch.aclose() for watch in self._watches), *(lease.stop() for lease in self._leases)
        )
        self._watches.clear()
        self._leases.clear()
        await self._endpoints.close()

    async def _read(self, request: Any) -> Any:
        async def send(member: Endpoint, timeout: float) -> Any:
            return await member.kv.Range(request, timeout=timeout, metadata=WITH_LEADER)

        return await self._endpoints.call("range", send, repeat=True)


async def _server_version(endpoints: Endpoints) -> str:
    """Return the version of the first member that answers; raises Incompatible."""

    async def send(member: Endpoint, timeout: float) -> Any:
        return await member.maintenance.Status(rpc_pb2.StatusRequest(), timeout=timeout)

    answer = await endpoints.call("status", send, repeat=True)
    version: str = answer.version
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise Incompatible(f"etcd: the server is version {version!r}; {wanted} or newer is needed")
    return version


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(kv.key.decode(), kv.value, kv.mod_revision, kv.create_revision, kv.lease)


def _compare(compare: Compare) -> Any:
    return rpc_pb2.Compare(
        result=rpc_pb2.Compare.EQUAL,
        target=rpc_pb2.Compare.MOD,
        key=compare.key.encode(),
        mod_revision=compare.mod_revision,
    )


def _operation(operation: Put | Delete) -> Any:
    key = operation.key.encode()
    if isinstance(operation, Delete):
        return rpc_pb2.RequestOp(request_delete_range=rpc_pb2.DeleteRangeRequest(key=key))
    put = rpc_pb2.PutRequest(key=key, value=operation.value, lease=operation.lease)
    return rpc_pb2.RequestOp(request_put=put)
