"""The guard at the door: who calls, whether it may, and what is written down of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from controld.api.callers import Authenticator, Caller
from controld.api.refusals import abort, name_of
from controld.api.verbs import OPEN, RULES, Rule
from controld.audit import OK, Audit
from controld.core.grants import POOL_VERBS, TASK_VERBS, Grant, Grants, Rights
from corefleet.clock import Clock
from corefleet.errors import CorefleetError, PermissionDenied, Unauthenticated

_FACTS = (
    ("pool", "pool"), ("name", "pool"), ("tenant", "tenant"), ("session", "session"),
    ("task", "task"), ("node", "node"), ("request_id", "request_id"),
)  # fmt: skip
"""Fields of requests that the audit log tells, and their names there."""
_FACTS_OF_REPLIES = (("task", "task"), ("pool", "pool"), ("request_id", "request_id"))
_LONGEST_STREAM_S = 30 * 24 * 3600.0
"""Of a stream that a token opened: timers of event loops do not take any number."""
_NOBODY = Rule(None)
_DENIALS = (name_of(Unauthenticated()), name_of(PermissionDenied()))


class Access:
    """One call's right to what it asks for; the servicers get it in place of gRPC's context.

    The guard has seen that the caller may do the call's verb somewhere. A servicer asks
    about each pool and tenant that the call turns out to concern.
    """

    def __init__(self, guard: Guard, rule: Rule, caller: Caller, context: Any) -> None:
        self._guard = guard
        self._rule = rule
        self._context = context
        self._grants = guard.grants
        self._rights = guard.grants.rights(caller.name, caller.who)
        self.caller = caller
        self.asked = False
        """Whether a servicer asked about a pool."""

    @property
    def by(self) -> str:
        """What a task's record says of who submitted it; '' when nobody is known."""
        return "" if self.caller.who.plain and not self.caller.who.subject else self.caller.name

    @property
    def rights(self) -> Rights:
        """What the caller may do, by the grants of this moment."""
        if self._grants is not self._guard.grants:
            self._grants = self._guard.grants
            self._rights = self._grants.rights(self.caller.name, self.caller.who)
        return self._rights

    @property
    def everywhere(self) -> bool:
        """Whether the call may concern any pool and tenant: then there is nothing to ask."""
        return self._rule.verb is None or self.rights.everywhere(self._rule.verb)

    def allows(self, pool: str, tenant: str | None = None) -> bool:
        """Whether the caller may do what it asks for in `pool`, for `tenant` ('': nobody's).

        Without a tenant: for some tenant at least.
        """
        self.asked = True
        return self._rule.verb is None or self.rights.may(self._rule.verb, pool, tenant)

    def check(self, pool: str, tenant: str | None = None) -> None:
        """Raise PermissionDenied unless the caller may do what it asks for there."""
        if not self.allows(pool, tenant):
            raise self.denial(pool, tenant)

    def denial(self, pool: str, tenant: str | None = None) -> PermissionDenied:
        """Return the refusal that names who, verb and pool."""
        verb = self._rule.verb
        assert verb is not None, "a call without a verb is denied to nobody"
        return PermissionDenied(self.rights.refusal(verb, pool, tenant))

    def audit(self) -> Audit:
        """Return what writes this caller's records."""
        return Audit(self.caller.name, self._context.peer(), self.caller.beside)

    async def write(self, message: Any) -> None:
        """Send one message of a stream."""
        self.answering()
        await self._context.write(message)

    def answering(self) -> None:
        """Raise PermissionDenied when a limited caller is answered and nobody asked where."""
        verb = self._rule.verb
        if not self.asked and (verb in TASK_VERBS or verb in POOL_VERBS) and not self.everywhere:
            raise PermissionDenied(f"{self.caller.name}: {verb}: no servicer asked in which pool")


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Stands before every RPC of the server, so that no servicer can forget it.

    Errors of corefleet that a servicer raises become the call's status here, too.
    """

    def __init__(self, clock: Clock, authenticator: Authenticator, grants: Sequence[Grant]) -> None:
        self._clock = clock
        self._handlers: dict[str, Any] = {}
        self.authenticator = authenticator
        self.grants = Grants(grants)

    async def start(self) -> None:
        """Make ready to say who calls. Raises ConfigError."""
        await self.authenticator.start()

    async def close(self) -> None:
        """End what `start` began. Idempotent."""
        await self.authenticator.close()

    async def replace(self, authenticator: Authenticator, grants: Sequence[Grant]) -> None:
        """Go on with another configuration, for streams that are open, too.

        Raises ConfigError, and then nothing has changed.
        """
        await authenticator.start()
        before, self.authenticator = self.authenticator, authenticator
        self.grants = Grants(grants)
        await before.close()

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        method = handler_call_details.method
        guarded = self._handlers.get(method)
        if guarded is not None:
            return guarded
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(OPEN):
            return handler
        guarded = self._handlers[method] = self._guarded(method, handler)
        return guarded

    def _guarded(self, method: str, handler: Any) -> Any:
        name, rule = method.rpartition("/")[2], RULES.get(method)
        if handler.response_streaming:
            return _stream_handler(handler, self._stream(name, rule, handler))
        return _unary_handler(handler, self._unary(name, rule, handler))

    def _unary(self, name: str, rule: Rule | None, handler: Any) -> Any:
        behave = handler.stream_unary if handler.request_streaming else handler.unary_unary

        async def answer(request: Any, context: Any) -> Any:
            call = _Call(self, name, rule, context, request)
            try:
                access = call.admit()
                reply = await behave(request, access)
                access.answering()
            except CorefleetError as error:
                call.result = name_of(error)
                await abort(context, error)
            except asyncio.CancelledError:
                call.result = "CANCELLED"
                raise
            else:
                call.result = OK
                call.reply = reply
                return reply
            finally:
                call.ended()

        return answer

    def _stream(self, name: str, rule: Rule | None, handler: Any) -> Any:
        behave = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def answer(request: Any, context: Any) -> None:
            call = _Call(self, name, rule, context, request)
            try:
                access = call.admit()
                async with asyncio.timeout(self._left_s(access.caller)) as left:
                    made = behave(request, access)
                    if isinstance(made, Awaitable):
                        await made
                    else:
                        async with aclosing(made) as messages:
                            async for message in messages:
                                await access.write(message)
            except TimeoutError:
                if not left.expired():
                    raise
                error = Unauthenticated("token: it has expired; call again with a new one")
                call.result = name_of(error)
                await abort(context, error)
            except CorefleetError as error:
                call.result = name_of(error)
                await abort(context, error)
            except asyncio.CancelledError:
                call.result = "CANCELLED"
                raise
            else:
                call.result = OK
            finally:
                call.ended()

        return answer

    def _left_s(self, caller: Caller) -> float | None:
        """Return for how long a stream may go on: as long as the token that opened it."""
        if not caller.until_s:
            return None
        left_s = caller.until_s - self._clock.wall_ms() / 1000
        return min(max(0.0, left_s), _LONGEST_STREAM_S)

    def now_s(self) -> float:
        """Return the time by which calls are measured."""
        return self._clock.monotonic()


class _Call:
    """One call from its coming to its record in the audit log."""

    __slots__ = ("access", "begun_s", "context", "guard", "name", "reply", "request", "result",
                 "rule")  # fmt: skip

    def __init__(
        self, guard: Guard, name: str, rule: Rule | None, context: Any, request: Any
    ) -> None:
        self.guard = guard
        self.name = name
        self.rule = rule or _NOBODY
        self.context = context
        self.request = request
        self.reply: Any = None
        self.access: Access | None = None
        self.result = "UNKNOWN"
        """What the client is told when a servicer fails in a way that nobody foresaw."""
        self.begun_s = guard.now_s()

    def admit(self) -> Access:
        """Return the caller's access; raises Unauthenticated, PermissionDenied."""
        caller = self.guard.authenticator.caller(
            self.context.invocation_metadata() or (), self.context.auth_context()
        )
        access = self.access = Access(self.guard, self.rule, caller, self.context)
        if self.rule is _NOBODY:
            raise PermissionDenied(f"{caller.name} may not call {self.name}: nobody may")
        if self.rule.verb is not None and not access.rights.holds(self.rule.verb):
            raise PermissionDenied(
                access.rights.refusal(self.rule.verb, getattr(self.request, "pool", "") or None)
            )
        return access

    def ended(self) -> None:
        """Write it down if it changes something or was denied."""
        denied = self.result in _DENIALS
        if not (self.rule.mutates or denied):
            return
        caller = self.access.caller if self.access is not None else None
        facts = _facts(self.request, _FACTS)
        if self.reply is not None:
            facts |= _facts(self.reply, _FACTS_OF_REPLIES)
        Audit(
            caller.name if caller else "", self.context.peer(), caller.beside if caller else ""
        ).ended(
            self.name,
            self.rule.verb or "",
            self.result,
            (self.guard.now_s() - self.begun_s) * 1000,
            facts,
        )


def _facts(message: Any, told: Sequence[tuple[str, str]]) -> dict[str, str]:
    known = getattr(message, "DESCRIPTOR", None)
    if known is None:
        return {}
    fields = known.fields_by_name
    return {name: str(getattr(message, field)) for field, name in told if field in fields}


def _unary_handler(handler: Any, behave: Any) -> Any:
    make = (
        grpc.stream_unary_rpc_method_handler
        if handler.request_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(behave, handler.request_deserializer, handler.response_serializer)


def _stream_handler(handler: Any, behave: Any) -> Any:
    make = (
        grpc.stream_stream_rpc_method_handler
        if handler.request_streaming
        else grpc.unary_stream_rpc_method_handler
    )
    return make(behave, handler.request_deserializer, handler.response_serializer)
