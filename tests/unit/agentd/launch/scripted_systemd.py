"""systemd's manager as a script on a private bus: real processes, control groups as files.

It answers what the launcher calls, keeps to the order of events of the real one, and
misbehaves as a test tells it to. What the real one does with a property is not shown here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dbus_fast import Message, MessageType, Variant
from dbus_fast.aio import MessageBus
from dbus_fast.errors import DBusError

from agentd.core.cpulist import format_list
from agentd.hostfs import HostFs
from agentd.launch.properties import UNLIMITED

_NAME = "org.freedesktop.systemd1"
_MANAGER = f"{_NAME}.Manager"
_UNITS = "/org/freedesktop/systemd1/unit/u"
_CONFIG = """<busconfig><type>session</type><listen>unix:path={socket}</listen>
<auth>EXTERNAL</auth><policy context="default"><allow user="*"/><allow own="*"/>
<allow send_type="method_call"/><allow send_destination="*"/><allow receive_sender="*"/>
</policy></busconfig>"""
_CLD_EXITED, _CLD_KILLED = 1, 2


@dataclass
class Unit:
    """A loaded unit; `popen` for a service."""

    name: str
    number: int
    properties: dict[str, Any]
    popen: subprocess.Popen[bytes] | None = None
    held: bool = False
    ended: int | None = None
    result: str = "success"

    @property
    def group(self) -> str:
        if self.name.endswith(".scope"):
            return self.name
        if not self.name.endswith(".service"):
            parts = self.name.removesuffix(".slice").split("-")
            return "/".join("-".join(parts[: n + 1]) + ".slice" for n in range(len(parts)))
        return f"{Unit(self.properties['Slice'], 0, {}).group}/{self.name}"


@dataclass
class Script:
    """How it misbehaves."""

    version: str = "252.39-1~deb12u1"
    unknown: set[str] = field(default_factory=set)
    """Properties that this build does not know."""
    silent: set[str] = field(default_factory=set)
    """Methods that are never answered."""
    no_job_end: bool = False
    """Whether jobs that start services never end."""
    job_result: str = "done"
    """How jobs that start services end."""
    raw_limits: bool = True
    """Whether properties reach the control groups."""
    result: str = ""
    """What `Result` of an ended unit is, '' for the truth."""
    reaps: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: deaths are noticed at once."""


class PrivateBus:
    """A dbus-daemon of a test."""

    def __init__(self, directory: Path) -> None:
        self._socket = directory / "bus"
        self._config = directory / "bus.conf"
        self._config.write_text(_CONFIG.format(socket=self._socket))
        self._popen: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:path={self._socket}"

    async def start(self) -> None:
        self._socket.unlink(missing_ok=True)
        command = ("dbus-daemon", f"--config-file={self._config}", "--nofork", "--nopidfile")
        self._popen = subprocess.Popen(  # noqa: ASYNC220 - vfork: back within 2 ms
            (*command, "--print-address=1"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._popen.stdout is not None
        assert await asyncio.to_thread(self._popen.stdout.readline)

    async def stop(self) -> None:
        if self._popen is not None:
            self._popen.kill()
            await asyncio.to_thread(self._popen.communicate)
            self._popen = None


class ScriptedSystemd:
    """The manager. `calls` has the members called, in order."""

    def __init__(self, tree: Path, script: Script | None = None) -> None:
        self.tree = tree
        self.script = script or Script()
        self.script.reaps.set()
        self.units: dict[str, Unit] = {}
        self.calls: list[str] = []
        self.started: list[Unit] = []
        self._bus: MessageBus | None = None
        self._numbers = 0
        self._tasks: set[asyncio.Task[None]] = set()
        write(tree, "sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory pids\n")

    async def connect(self, address: str) -> None:
        self._bus = await MessageBus(address).connect()
        self._bus.add_message_handler(self._handle)
        await self._bus.request_name(_NAME)

    async def disconnect(self) -> None:
        if self._bus is not None:
            self._bus.disconnect()
            with contextlib.suppress(OSError, EOFError, DBusError):
                await self._bus.wait_for_disconnect()  # type: ignore[no-untyped-call]
            self._bus = None

    async def close(self) -> None:
        for unit in self.started:
            _kill(unit)
        await asyncio.gather(*self._tasks)
        await self.disconnect()

    def host(self) -> HostFs:
        return _Host(self)

    def services(self) -> list[str]:
        return [name for name in self.units if name.endswith(".service")]

    def load(self, name: str) -> None:
        """Have a unit that nobody of ours made."""
        self._numbers += 1
        self.units[name] = Unit(name, self._numbers, {})

    def group_file(self, unit: str, name: str) -> Path:
        return self.tree / "sys/fs/cgroup" / self.units[unit].group / name

    def _handle(self, message: Message) -> Message | bool:
        if message.message_type is not MessageType.METHOD_CALL:
            return False
        member = message.member or ""
        method = getattr(self, f"_on_{re.sub('(?<!^)(?=[A-Z])', '_', member).lower()}", None)
        if method is None:
            return False
        self.calls.append(member)
        if member in self.script.silent:
            return True
        signature, body = method(message, *message.body)
        return Message.new_method_return(message, signature, body)

    def _on_subscribe(self, _: Message) -> tuple[str, list[Any]]:
        return "", []

    def _on_get(self, _: Message, interface: str, name: str) -> tuple[str, list[Any]]:
        assert (interface, name) == (_MANAGER, "Version")
        return "v", [Variant("s", self.script.version)]

    def _on_get_unit(self, _: Message, name: str) -> tuple[str, list[Any]]:
        return "o", [f"{_UNITS}{self._unit(name).number}"]

    def _on_get_all(self, message: Message, interface: str) -> tuple[str, list[Any]]:
        number = int((message.path or "").removeprefix(_UNITS))
        unit = next((u for u in self.units.values() if u.number == number), None)
        if unit is None:
            raise DBusError("org.freedesktop.DBus.Error.UnknownObject", "Unknown object")
        return "a{sv}", [self._service(unit)]

    def _on_start_transient_unit(
        self, _: Message, name: str, mode: str, properties: Any, aux: Any
    ) -> tuple[str, list[Any]]:
        if name in self.units:
            raise DBusError(f"{_NAME}.UnitExists", f"Unit {name} was already loaded")
        values = self._known(properties)
        self._numbers += 1
        unit = Unit(name, self._numbers, values, held=bool(values.get("AddRef")))
        self.units[name] = unit
        self.started.append(unit)
        self._apply(unit)
        if name.endswith(".service"):
            self._run(unit)
            return self._job(unit, "" if self.script.no_job_end else self.script.job_result)
        return self._job(unit, "done")

    def _on_stop_unit(self, _: Message, name: str, mode: str) -> tuple[str, list[Any]]:
        unit = self._unit(name)
        _kill(unit)
        return self._job(unit, "done")

    def _on_kill_unit(self, _: Message, name: str, who: str, number: int) -> tuple[str, list[Any]]:
        unit = self._unit(name)
        assert (who, number) == ("all", signal.SIGKILL)
        _kill(unit)
        return "", []

    def _on_reset_failed_unit(self, _: Message, name: str) -> tuple[str, list[Any]]:
        self._unit(name)
        return "", []

    def _on_ref_unit(self, _: Message, name: str) -> tuple[str, list[Any]]:
        self._unit(name).held = True
        return "", []

    def _on_unref_unit(self, _: Message, name: str) -> tuple[str, list[Any]]:
        unit = self._unit(name)
        unit.held = False
        self._collect(unit)
        return "", []

    def _on_set_unit_properties(
        self, _: Message, name: str, runtime: bool, properties: Any
    ) -> tuple[str, list[Any]]:
        assert runtime
        unit = self._unit(name)
        unit.properties |= self._known(properties)
        self._apply(unit)
        return "", []

    def _on_list_units_by_patterns(
        self, _: Message, states: list[str], patterns: list[str]
    ) -> tuple[str, list[Any]]:
        rows = [
            [name, "", "loaded", "active", "running", "", "/", 0, "", "/"]
            for name in self.services()
        ]
        return "a(ssssssouso)", [rows]

    def _unit(self, name: str) -> Unit:
        unit = self.units.get(name)
        if unit is None:
            raise DBusError(f"{_NAME}.NoSuchUnit", f"Unit {name} not loaded.")
        return unit

    def _known(self, properties: Any) -> dict[str, Any]:
        values = {name: variant.value for name, variant in properties}
        for name in values:
            if name in self.script.unknown:
                raise DBusError(
                    "org.freedesktop.DBus.Error.PropertyReadOnly",
                    f"Cannot set property {name}, or unknown property.",
                )
        return values

    def _job(self, unit: Unit, result: str) -> tuple[str, list[Any]]:
        job = f"/org/freedesktop/systemd1/job/{unit.number}"
        if result and self._bus is not None:
            signal_ = Message.new_signal(
                "/org/freedesktop/systemd1",
                _MANAGER,
                "JobRemoved",
                "uoss",
                [unit.number, job, unit.name, result],
            )
            asyncio.get_running_loop().call_soon(self._bus.send, signal_)
        return "o", [job]

    def _run(self, unit: Unit) -> None:
        ((path, argv, _),) = unit.properties["ExecStart"]
        environment = dict(e.split("=", 1) for e in unit.properties.get("Environment", ()))
        unit.popen = subprocess.Popen(
            [word.replace("$$", "$") for word in argv],
            executable=path,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        task = asyncio.create_task(self._reap(unit, unit.popen))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reap(self, unit: Unit, popen: subprocess.Popen[bytes]) -> None:
        died = asyncio.Event()
        pidfd = os.pidfd_open(popen.pid)
        loop = asyncio.get_running_loop()
        loop.add_reader(pidfd, died.set)
        await died.wait()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        await self.script.reaps.wait()
        unit.ended = popen.wait()
        unit.result = self.script.result or ("success" if unit.ended == 0 else "exit-code")
        self._collect(unit)

    def _collect(self, unit: Unit) -> None:
        if not unit.held and unit.ended is not None:
            self.units.pop(unit.name, None)

    def _service(self, unit: Unit) -> dict[str, Variant]:
        ended = unit.ended
        pid = unit.popen.pid if unit.popen is not None and ended is None else 0
        killed = ended is not None and ended < 0
        return {
            "MainPID": Variant("u", pid),
            "ControlGroup": Variant("s", f"/{unit.group}" if pid else ""),
            "Slice": Variant("s", unit.properties.get("Slice", "")),
            "LogExtraFields": Variant("aay", unit.properties.get("LogExtraFields", [])),
            "Result": Variant("s", unit.result),
            "ExecMainCode": Variant(
                "i", 0 if ended is None else _CLD_KILLED if killed else _CLD_EXITED
            ),
            "ExecMainStatus": Variant("i", abs(ended or 0)),
            "ExecMainExitTimestampMonotonic": Variant("t", 0 if ended is None else 1),
        }

    def _apply(self, unit: Unit) -> None:
        """Write what the properties mean into the unit's control group."""
        if not self.script.raw_limits:
            return
        values, group = unit.properties, f"sys/fs/cgroup/{unit.group}"
        for name, property_ in (
            ("cpuset.cpus.effective", "AllowedCPUs"),
            ("cpuset.mems.effective", "AllowedMemoryNodes"),
        ):
            bits = int.from_bytes(values.get(property_, b""), sys.byteorder)
            numbers = [n for n in range(bits.bit_length()) if bits >> n & 1]
            write(self.tree, f"{group}/{name}", format_list(numbers) + "\n")
            if numbers:
                # The kernel takes no empty list for a group that has processes.
                asked = name.removesuffix(".effective")
                write(self.tree, f"{group}/{asked}", format_list(numbers) + "\n")
        for name, property_ in (
            ("memory.high", "MemoryHigh"),
            ("memory.max", "MemoryMax"),
            ("pids.max", "TasksMax"),
        ):
            write(self.tree, f"{group}/{name}", f"{_limit(values.get(property_, UNLIMITED))}\n")
        quota = values.get("CPUQuotaPerSecUSec", UNLIMITED)
        micros = "max" if quota == UNLIMITED else str(quota // 10)
        write(self.tree, f"{group}/cpu.max", f"{micros} 100000\n")


class _Host(HostFs):
    """The running machine, with the control groups of the script."""

    def __init__(self, systemd: ScriptedSystemd) -> None:
        super().__init__()
        self._systemd = systemd

    def read(self, path: str, most_bytes: int = 1 << 20) -> str | None:
        if path.startswith("sys/fs/cgroup"):
            return HostFs(self._systemd.tree).read(path, most_bytes)
        match = re.fullmatch(r"proc/(\d+)/cgroup", path)
        for unit in self._systemd.units.values():
            if match and unit.popen is not None and unit.popen.pid == int(match[1]):
                return f"0::/{unit.group}\n"
        return super().read(path, most_bytes)


async def until(holds: Callable[[], object], within_s: float = 20.0) -> None:
    """Wait for what nobody tells us of; raises TimeoutError."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - what it looks at has no event
            await asyncio.sleep(0.01)


def write(tree: Path, path: str, text: str) -> None:
    file = tree / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _limit(value: int) -> str:
    return "max" if value == UNLIMITED else str(value)


def _kill(unit: Unit) -> None:
    if unit.popen is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(unit.popen.pid, signal.SIGKILL)
