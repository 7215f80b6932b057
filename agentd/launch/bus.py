"""systemd's manager over D-Bus: calls with deadlines, jobs awaited, reconnection.

Method and signal names are those of org.freedesktop.systemd1(5). Nothing here waits longer
than it was told to: a bus that is gone or silent is a LaunchFailed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from dbus_fast import BusType, Message, MessageType, Variant
from dbus_fast.aio import MessageBus
from dbus_fast.errors import AuthError, DBusError, InvalidAddressError

from corefleet.background import stop
from corefleet.errors import LaunchFailed

_NAME = "org.freedesktop.systemd1"
_PATH = "/org/freedesktop/systemd1"
_MANAGER = "org.freedesktop.systemd1.Manager"
_PROPERTIES = "org.freedesktop.DBus.Properties"
_JOB_REMOVED = f"type='signal',sender='{_NAME}',interface='{_MANAGER}',member='JobRemoved'"
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0

NO_SUCH_UNIT = "org.freedesktop.systemd1.NoSuchUnit"
UNIT_EXISTS = "org.freedesktop.systemd1.UnitExists"
PROPERTY_REFUSED = "org.freedesktop.DBus.Error.PropertyReadOnly"

Properties = tuple[tuple[str, Variant], ...]
"""Names and values of a unit's properties."""

_log = structlog.get_logger(__name__)


class Refused(LaunchFailed):
    """systemd or the bus answered with an error; `name` is its D-Bus name."""

    def __init__(self, call: str, name: str, text: str) -> None:
        super().__init__(f"systemd refused {call}: {text} ({name})")
        self.name = name
        self.text = text


class Systemd:
    """A connection to systemd's manager, made anew when it drops. Made by `connect`."""

    def __init__(self, address: str | None, call_timeout_s: float) -> None:
        self._address = address
        self._call_timeout_s = call_timeout_s
        self._bus: MessageBus | None = None
        self._connecting = asyncio.Lock()
        self._dropped: asyncio.Task[None] | None = None
        self._jobs: dict[str, set[asyncio.Future[str]]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._closed = False
        self._back: Callable[[], Awaitable[None]] | None = None

    @classmethod
    async def connect(cls, address: str | None, call_timeout_s: float) -> Systemd:
        """Connect to the bus at `address` (None: the system bus).

        Raises LaunchFailed when there is no bus, or no systemd on it.
        """
        systemd = cls(address, call_timeout_s)
        try:
            await systemd._connected()
        except BaseException:  # cancelled, too: nobody else would close the connection
            await systemd.close()
            raise
        systemd._keeper = asyncio.create_task(systemd._keep(), name="systemd connection")
        return systemd

    def when_back(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call `callback` after each reconnection; what it raises as LaunchFailed is logged."""
        self._back = callback

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        self._closed = True
        await stop(self._keeper)
        if self._bus is not None and self._dropped is not None:
            self._bus.disconnect()
            await asyncio.wait((self._dropped,))
        self._fail_jobs("the connection is closed")

    async def manager(self, member: str, signature: str = "", *body: object) -> list[Any]:
        """Call a method of the manager; return what it answers.

        Raises Refused for an error, LaunchFailed without an answer.
        """
        return await self._call(_PATH, _MANAGER, member, signature, *body)

    async def unit(self, unit: str, member: str) -> None:
        """Call a method without arguments of a unit, e.g. `Ref`."""
        path = await self._unit_path(unit)
        await self._call(path, f"{_NAME}.Unit", member, "")

    async def properties(self, unit: str, kind: str) -> dict[str, Any]:
        """Return a unit's properties of `kind`: `Unit`, `Service` or `Slice`."""
        path = await self._unit_path(unit)
        answer = await self._call(path, _PROPERTIES, "GetAll", "s", f"{_NAME}.{kind}")
        return {name: value.value for name, value in answer[0].items()}

    async def version(self) -> str:
        """Return systemd's own words for its version, e.g. `252.39-1~deb12u1`."""
        answer = await self._call(_PATH, _PROPERTIES, "Get", "ss", _MANAGER, "Version")
        return str(answer[0].value)

    async def start_transient(self, unit: str, properties: Properties, timeout_s: float) -> str:
        """Make and start a unit; return its job's result: `done`, `failed`, `timeout` or so."""
        body: tuple[object, ...] = (unit, "fail", [list(item) for item in properties], [])
        return await self._job(unit, timeout_s, "StartTransientUnit", "ssa(sv)a(sa(sv))", *body)

    async def stop(self, unit: str, timeout_s: float) -> str:
        """Stop a unit; return its job's result."""
        return await self._job(unit, timeout_s, "StopUnit", "ss", unit, "replace")

    async def set_properties(self, unit: str, properties: Properties) -> None:
        """Change a unit until the next boot."""
        body = (unit, True, [list(item) for item in properties])
        await self.manager("SetUnitProperties", "sba(sv)", *body)

    async def _unit_path(self, unit: str) -> str:
        return str((await self.manager("GetUnit", "s", unit))[0])

    async def _job(
        self, unit: str, timeout_s: float, member: str, signature: str, *body: object
    ) -> str:
        """Call what makes a job for `unit`, and wait until the job is removed."""
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # Registered first: the signal may come together with the answer.
        self._jobs.setdefault(unit, set()).add(done)
        try:
            async with asyncio.timeout(timeout_s):
                await self.manager(member, signature, *body)
                return await done
        except TimeoutError:
            raise LaunchFailed(f"{member} {unit}: its job took more than {timeout_s} s") from None
        finally:
            self._jobs[unit].discard(done)
            if not self._jobs[unit]:
                del self._jobs[unit]
            if not done.cancel() and not done.cancelled():
                done.exception()

    async def _call(
        self, path: str, interface: str, member: str, signature: str, *body: object
    ) -> list[Any]:
        bus = await self._connected()
        return await self._call_on(bus, _NAME, path, interface, member, signature, *body)

    async def _call_on(
        self,
        bus: MessageBus,
        destination: str,
        path: str,
        interface: str,
        member: str,
        signature: str,
        *body: object,
    ) -> list[Any]:
        message = Message(
            destination=destination,
            path=path,
            interface=interface,
            member=member,
            signature=signature,
            body=list(body),
        )
        try:
            async with asyncio.timeout(self._call_timeout_s):
                # None: the library's answer to a call in flight when the other side hangs up.
                reply: Message | None = await bus.call(message)
        except TimeoutError:
            raise LaunchFailed(
                f"systemd: {member}: no answer within {self._call_timeout_s} s"
            ) from None
        except (OSError, EOFError, DBusError) as error:
            raise LaunchFailed(f"systemd: {member}: the bus is gone: {error!r}") from error
        if reply is None:
            raise LaunchFailed(f"systemd: {member}: the bus hung up")
        if reply.message_type is MessageType.ERROR:
            text = str(reply.body[0]) if reply.body else "no reason given"
            raise Refused(member, reply.error_name or "", text)
        return list(reply.body)

    async def _connected(self) -> MessageBus:
        """Return a live connection, made now if need be."""
        async with self._connecting:
            if self._closed:
                raise LaunchFailed("systemd: the connection is closed")
            if self._bus is not None and self._bus.connected:
                return self._bus
            self._bus = await self._connect()
            self._dropped = asyncio.create_task(_drop(self._bus), name="systemd's bus")
            return self._bus

    async def _connect(self) -> MessageBus:
        where = self._address or "the system bus"
        try:
            bus = MessageBus(self._address, BusType.SYSTEM)
            async with asyncio.timeout(self._call_timeout_s):
                await bus.connect()
        except TimeoutError:
            raise LaunchFailed(f"{where}: no answer within {self._call_timeout_s} s") from None
        except (OSError, EOFError, AuthError, DBusError, InvalidAddressError) as error:
            raise LaunchFailed(f"{where}: {error}") from error
        try:
            await self._call_on(
                bus,
                "org.freedesktop.DBus",
                "/org/freedesktop/DBus",
                "org.freedesktop.DBus",
                "AddMatch",
                "s",
                _JOB_REMOVED,
            )
            bus.add_message_handler(self._message)
            await self._call_on(bus, _NAME, _PATH, _MANAGER, "Subscribe", "")
        except BaseException:  # cancelled, too: nobody else knows of this connection
            bus.disconnect()
            await _drop(bus)
            raise
        return bus

    def _message(self, message: Message) -> None:
        if message.message_type is MessageType.SIGNAL and message.member == "JobRemoved":
            _, _, unit, result = message.body
            for waiting in self._jobs.get(unit, ()):
                if not waiting.done():
                    waiting.set_result(result)

    async def _keep(self) -> None:
        """Reconnect whenever the connection drops."""
        pause = _FIRST_PAUSE_S
        while True:
            if self._dropped is not None:
                # Waited for without being cancelled together with us.
                await asyncio.wait((self._dropped,))
                self._fail_jobs("the bus hung up")
            try:
                await self._connected()
                pause = _FIRST_PAUSE_S
                _log.info("Connected to systemd again")
                if self._back is not None:
                    await self._back()
            except LaunchFailed as error:
                _log.warning("systemd cannot be reached", reason=str(error), again_in_s=pause)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE_S)

    def _fail_jobs(self, reason: str) -> None:
        for unit, all_waiting in self._jobs.items():
            for waiting in all_waiting:
                if not waiting.done():
                    waiting.set_exception(LaunchFailed(f"systemd: job of {unit}: {reason}"))


async def _drop(bus: MessageBus) -> None:
    """Return when `bus` is no longer connected; the reason does not matter here."""
    try:
        await bus.wait_for_disconnect()  # type: ignore[no-untyped-call]
    except (OSError, EOFError, DBusError) as error:
        _log.debug("The connection to systemd dropped", reason=repr(error))
