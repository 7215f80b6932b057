"""What the plant's servers say of themselves."""

from __future__ import annotations

import asyncio
import urllib.request

import msgspec

from corefleet.adapters.nats_bus import NatsBus
from corefleet.errors import CorefleetError

_ANSWER_S = 1.0


class Replica(msgspec.Struct, frozen=True):
    name: str
    current: bool = False
    lag: int = 0


class StreamCluster(msgspec.Struct, frozen=True):
    leader: str = ""
    replicas: list[Replica] = []

    def lagging(self, wanted: int) -> str:
        """Return what keeps the stream from having `wanted` replicas that are level."""
        if not self.leader:
            return "no leader"
        behind = [replica for replica in self.replicas if not replica.current]
        if behind or len(self.replicas) + 1 < wanted:
            return f"{self.leader} leads {self.replicas}"
        return ""


class Stream(msgspec.Struct, frozen=True):
    """A stream as its leader tells it (STREAM.INFO)."""

    cluster: StreamCluster
    state: dict[str, object] = {}


class EtcdStatus(msgspec.Struct, frozen=True):
    """An etcd member's word (/v3/maintenance/status)."""

    header: dict[str, str]
    leader: str = "0"

    @property
    def is_leader(self) -> bool:
        return self.leader == self.header["member_id"]


class _Meta(msgspec.Struct, frozen=True):
    leader: str = ""


class _JetStream(msgspec.Struct, frozen=True):
    meta_cluster: _Meta = _Meta()


class _Connection(msgspec.Struct, frozen=True):
    name: str = ""


class _Connections(msgspec.Struct, frozen=True):
    connections: list[_Connection] = []


async def stream(bus: NatsBus, name: str) -> Stream | None:
    """Return a stream, None while nobody answers for it."""
    try:
        answer = await bus.call(f"$JS.API.STREAM.INFO.{name}", b"", _ANSWER_S)
    except CorefleetError:
        return None
    try:
        return msgspec.json.decode(answer.payload, type=Stream)
    except msgspec.ValidationError:
        return None  # an error: no stream yet, or no leader


async def etcd_status(address: str) -> EtcdStatus | None:
    """Return what the member says; None when it does not answer, or knows no leader."""
    text = await _fetch(f"http://{address}:2379/v3/maintenance/status", b"{}")
    if text is None:
        return None
    status = msgspec.json.decode(text, type=EtcdStatus)
    return status if status.leader != "0" else None


async def meta_leader(address: str) -> str:
    """Return who leads JetStream, as this server knows; '' when it knows nobody."""
    text = await _fetch(f"http://{address}:8222/jsz")
    return "" if text is None else msgspec.json.decode(text, type=_JetStream).meta_cluster.leader


async def connected(address: str) -> list[str]:
    """Return the names of the connections that a NATS server has."""
    text = await _fetch(f"http://{address}:8222/connz?limit=1000")
    if text is None:
        return []
    return [c.name for c in msgspec.json.decode(text, type=_Connections).connections]


async def _fetch(url: str, body: bytes | None = None) -> bytes | None:
    def fetch() -> bytes | None:
        try:
            with urllib.request.urlopen(url, body, timeout=_ANSWER_S) as answer:
                return bytes(answer.read())
        except OSError:
            return None

    return await asyncio.to_thread(fetch)
