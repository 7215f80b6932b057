"""What a controld's refusals are in Python: gRPC statuses as corefleet.errors."""

from __future__ import annotations

from typing import Any

import grpc.aio
from google.rpc import code_pb2, error_details_pb2, status_pb2

from corefleet.errors import (
    Conflict,
    CorefleetError,
    Exhausted,
    InvalidInput,
    NotFound,
    PermissionDenied,
    Timeout,
    Unauthenticated,
    Unavailable,
)
from corefleet.rpc import tasks_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_DEFAULT_PAUSE_S = 1.0
_BROKEN_CONNECTION = "Internal error from Core"
"""What grpc.aio says, with INTERNAL, of a stream whose connection broke under a write."""


class Refused(InvalidInput):
    """A request that the control plane refused; `field` names what is at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, "", "")
        self.args = (message,)
        self.value = None
        self.expected = message.rpartition("; expected ")[2]


def from_call(error: grpc.aio.AioRpcError) -> CorefleetError:
    """Return what the failed call `error` means."""
    field, pause = "", 0.0
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == _DETAILS_KEY:
            field, pause = _details(value)
    return _error(int(error.code().value[0]), error.details() or "", field, pause)


def from_refusal(refusal: tasks_pb2.Refusal) -> CorefleetError:
    """Return what a refusal on a SubmitStream means."""
    pause = refusal.retry_after_ms / 1000
    return _error(refusal.code, refusal.message, refusal.field, pause)


def _error(code: int, message: str, field: str, pause_s: float) -> CorefleetError:
    match code:
        case code_pb2.INVALID_ARGUMENT:
            return Refused(field, message)
        case code_pb2.NOT_FOUND:
            return NotFound(message)
        case code_pb2.ALREADY_EXISTS | code_pb2.FAILED_PRECONDITION:
            return Conflict(message)
        case code_pb2.UNAUTHENTICATED:
            return Unauthenticated(message)
        case code_pb2.PERMISSION_DENIED:
            return PermissionDenied(message)
        case code_pb2.RESOURCE_EXHAUSTED:
            return Exhausted(message, pause_s or _DEFAULT_PAUSE_S)
        case code_pb2.DEADLINE_EXCEEDED:
            return Timeout(f"no answer in time: {message}")
        case code_pb2.UNAVAILABLE | code_pb2.CANCELLED:
            return Unavailable(message)
        case code_pb2.INTERNAL if message == _BROKEN_CONNECTION:
            return Unavailable(message)
        case _:
            return CorefleetError(f"{code_pb2.Code.Name(code)}: {message}")


def _details(packed: bytes) -> tuple[str, float]:
    """Return the field at fault and the pause in seconds that a rich status names."""
    field, pause = "", 0.0
    for detail in status_pb2.Status.FromString(packed).details:
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            request = error_details_pb2.BadRequest()
            detail.Unpack(request)
            field = request.field_violations[0].field if request.field_violations else ""
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            pause = info.retry_delay.ToMilliseconds() / 1000
    return field, pause
