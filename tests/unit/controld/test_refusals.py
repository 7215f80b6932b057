"""Our errors over gRPC and back: the client meets the same exception, with its details."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2

from controld.api.refusals import AlreadyEnded, refusal_of, status_of
from corefleet import refused
from corefleet.errors import (
    ConfigError,
    Conflict,
    CorefleetError,
    CorruptRecord,
    Exhausted,
    InvalidInput,
    NotFound,
    PermissionDenied,
    StoreFull,
    Timeout,
    Unauthenticated,
    Unavailable,
)

CASES: list[tuple[CorefleetError, int, type[CorefleetError]]] = [
    (InvalidInput("input", "x", "UTF-8"), code_pb2.INVALID_ARGUMENT, InvalidInput),
    (ConfigError("spec_toml: `p.slots`: 0"), code_pb2.INVALID_ARGUMENT, InvalidInput),
    (NotFound("pool 'x'"), code_pb2.NOT_FOUND, NotFound),
    (Conflict("request id"), code_pb2.ALREADY_EXISTS, Conflict),
    (AlreadyEnded("as done"), code_pb2.FAILED_PRECONDITION, Conflict),
    (Exhausted("too much", 1.5), code_pb2.RESOURCE_EXHAUSTED, Exhausted),
    (StoreFull("no room"), code_pb2.RESOURCE_EXHAUSTED, Exhausted),
    (Timeout("no answer"), code_pb2.UNAVAILABLE, Unavailable),
    (Unauthenticated("no token"), code_pb2.UNAUTHENTICATED, Unauthenticated),
    (PermissionDenied("a may not b"), code_pb2.PERMISSION_DENIED, PermissionDenied),
    (CorruptRecord("bytes"), code_pb2.INTERNAL, CorefleetError),
]


def call_error(error: CorefleetError) -> grpc.aio.AioRpcError:
    """Return what a client of grpc.aio gets when the service aborts with `error`."""
    status = status_of(error)
    codes = {int(code.value[0]): code for code in grpc.StatusCode}
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", status.SerializeToString()))
    return grpc.aio.AioRpcError(
        codes[status.code], grpc.aio.Metadata(), metadata, status.message, ""
    )


@pytest.mark.parametrize(("error", "code", "kind"), CASES)
def test_an_error_comes_back_as_what_it_was(
    error: CorefleetError, code: int, kind: type[CorefleetError]
) -> None:
    back = refused.from_call(call_error(error))
    assert status_of(error).code == code
    assert isinstance(back, kind)
    assert str(error) in str(back)


@pytest.mark.parametrize(("error", "code", "kind"), CASES)
def test_a_refusal_on_a_stream_says_the_same(
    error: CorefleetError, code: int, kind: type[CorefleetError]
) -> None:
    refusal = refusal_of(error)
    back = refused.from_refusal(refusal)
    assert refusal.code == code
    assert isinstance(back, kind)
    assert str(error) in str(back)


def test_the_field_at_fault_is_named() -> None:
    back = refused.from_call(call_error(InvalidInput("session", "a b", "letters")))
    assert isinstance(back, InvalidInput)
    assert (back.field, back.expected) == ("session", "letters")


def test_the_pause_is_kept() -> None:
    back = refused.from_call(call_error(Exhausted("too much", 1.5)))
    assert isinstance(back, Exhausted)
    assert back.retry_after_s == 1.5


def test_a_status_without_details_is_understood() -> None:
    plain = grpc.aio.AioRpcError(
        grpc.StatusCode.DEADLINE_EXCEEDED, grpc.aio.Metadata(), grpc.aio.Metadata(), "late", ""
    )
    assert isinstance(refused.from_call(plain), Timeout)
