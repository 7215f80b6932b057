"""How our errors look to clients: gRPC codes with details, or a Refusal on a stream."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from google.protobuf import any_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from corefleet.errors import (
    ConfigError,
    Conflict,
    CorefleetError,
    Exhausted,
    Fenced,
    Incompatible,
    InvalidInput,
    NotFound,
    PermissionDenied,
    StoreFull,
    Unauthenticated,
    Unavailable,
)
from corefleet.rpc import tasks_pb2

_RETRY_UNAVAILABLE_S = 0.2
_RETRY_FULL_S = 5.0


class AlreadyEnded(Conflict):
    """The task had ended before it could be cancelled."""


_CODES: tuple[tuple[type[CorefleetError], int], ...] = (
    (InvalidInput, code_pb2.INVALID_ARGUMENT),
    (ConfigError, code_pb2.INVALID_ARGUMENT),
    (NotFound, code_pb2.NOT_FOUND),
    (AlreadyEnded, code_pb2.FAILED_PRECONDITION),
    (Conflict, code_pb2.ALREADY_EXISTS),
    (Exhausted, code_pb2.RESOURCE_EXHAUSTED),
    (StoreFull, code_pb2.RESOURCE_EXHAUSTED),
    (Unavailable, code_pb2.UNAVAILABLE),
    (Fenced, code_pb2.ABORTED),
    (Incompatible, code_pb2.FAILED_PRECONDITION),
    (Unauthenticated, code_pb2.UNAUTHENTICATED),
    (PermissionDenied, code_pb2.PERMISSION_DENIED),
)


def code_of(error: CorefleetError) -> int:
    """Return the gRPC status code that stands for `error`."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return int(code)
    return int(code_pb2.INTERNAL)


def name_of(error: CorefleetError) -> str:
    """Return the name of the gRPC status code that stands for `error`."""
    return str(code_pb2.Code.Name(code_of(error)))


def field_of(error: CorefleetError) -> str:
    """Return the request's field at fault, '' if none is."""
    if isinstance(error, InvalidInput):
        return error.field
    return "spec_toml" if isinstance(error, ConfigError) else ""


def retry_after_s(error: CorefleetError) -> float:
    """Return the seconds after which the same call may succeed; 0 when it will not."""
    if isinstance(error, Exhausted):
        return error.retry_after_s
    if isinstance(error, StoreFull):
        return _RETRY_FULL_S
    return _RETRY_UNAVAILABLE_S if isinstance(error, Unavailable) else 0.0


def status_of(error: CorefleetError) -> status_pb2.Status:
    """Return the rich status: BadRequest names the field, RetryInfo the pause."""
    details: list[Message] = []
    field = field_of(error)
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=str(error))
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    pause = retry_after_s(error)
    if pause:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromMilliseconds(math.ceil(pause * 1000))
        details.append(info)
    status = status_pb2.Status(code=code_of(error), message=str(error))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def refusal_of(error: CorefleetError) -> tasks_pb2.Refusal:
    """Return the same as one message of a SubmitStream."""
    return tasks_pb2.Refusal(
        code=code_of(error),
        message=str(error),
        field=field_of(error),
        retry_after_ms=math.ceil(retry_after_s(error) * 1000),
    )


async def abort(context: Any, error: CorefleetError) -> NoReturn:
    """End the call of `context`, a ServicerContext, with the status that stands for `error`."""
    await context.abort_with_status(rpc_status.to_status(status_of(error)))
    raise AssertionError("abort_with_status returned")
