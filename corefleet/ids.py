"""Typed identifiers and the rules for spelling them.

Every id is safe as one NATS subject token and one etcd key segment.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import NewType

from corefleet.errors import InvalidInput

NodeId = NewType("NodeId", str)
RackId = NewType("RackId", str)
ControldId = NewType("ControldId", str)
PoolName = NewType("PoolName", str)
SessionName = NewType("SessionName", str)
TaskId = NewType("TaskId", str)
RequestId = NewType("RequestId", str)
ShardId = NewType("ShardId", int)
DomainId = NewType("DomainId", int)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}\Z")
_REQUEST = re.compile(r"[A-Za-z0-9_/:-]{1,128}\Z")
_TASK = re.compile(r"([0-9a-f]{1,4})-([0-9a-z]{26})\Z")


def check_name(field: str, value: str) -> str:
    """Return `value` if it can name a node, pool, session, rack or controld.

    Raises InvalidInput naming `field` otherwise.
    """
    if not _NAME.match(value):
        raise InvalidInput(field, value, "1 to 63 of A-Z a-z 0-9 _ -, not starting with -")
    return value


def check_request_id(value: str) -> RequestId:
    """Return `value` as a request id; raises InvalidInput naming `request_id`."""
    if not _REQUEST.match(value):
        raise InvalidInput("request_id", value, "1 to 128 of A-Z a-z 0-9 _ / : -")
    return RequestId(value)


def shard_of(pool: str, session: str, shards: int) -> ShardId:
    """Return the shard, in [0, shards), that owns the session `<pool>/<session>`."""
    digest = hashlib.blake2b(f"{pool}/{session}".encode(), digest_size=8).digest()
    return ShardId(int.from_bytes(digest, "big") % shards)


def session_for_request(request_id: str) -> SessionName:
    """Name the session of a submission that named none.

    Derived from the request id, so that a retried submission meets the same
    shard and is recognised there.
    """
    digest = hashlib.blake2b(request_id.encode(), digest_size=10).hexdigest()
    return SessionName(f"s{digest}")


def task_id_of(shard: int, request_id: str) -> TaskId:
    """Return the id of the task that a request id makes: shard in hex, then 128 bits of digest.

    The same request id always makes the same task (docs/architecture.md, rule 4).
    """
    digest = hashlib.blake2b(request_id.encode(), digest_size=16, person=b"task").digest()
    return TaskId(f"{shard:x}-{base64.b32encode(digest)[:26].decode().lower()}")


def shard_of_task(task: str) -> ShardId:
    """Return the shard spelled in a task id; raises InvalidInput naming `task`."""
    match = _TASK.match(task)
    if match is None:
        raise InvalidInput("task", task, "a task id such as 3f-01j5x0c9k2m4n6p8q0r2s4t6v8")
    return ShardId(int(match[1], 16))


def check_task_id(task: str, shards: int) -> TaskId:
    """Return `task` as a task id of a cluster of `shards`; raises InvalidInput."""
    if shard_of_task(task) >= shards:
        raise InvalidInput("task", task, f"a task id of this cluster of {shards} shards")
    return TaskId(task)


def step_key(task: str, step: int) -> str:
    """Return the idempotency key of a step, stable over attempts: `<task>/<step>`."""
    return f"{task}/{step}"
