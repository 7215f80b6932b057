"""One running QEMU: started, saved, restored and always ended."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tools.guest.errors import GuestError
from tools.guest.host import program, run
from tools.guest.image import READY, Image
from tools.guest.layout import Attached, Layout, qemu_command
from tools.guest.qmp import Monitor

CONSOLE_LOG = "console.log"
STATE = "state"
DISK = "disk.qcow2"
PAYLOAD = "payload.qcow2"
"""A saved machine is a directory with these: its memory and what it wrote to its disks."""

_START_LIMIT_S = 30.0
_STATE_LIMIT_S = 120.0
_END_LIMIT_S = 20.0
_TAIL_LINES = 15

# Runs QEMU and says its pid. When our end of stdin closes, also because we were killed, it
# kills QEMU and removes its directory.
_KEEPER = """
exec 3<&0
directory=$1; shift
"$@" >"$directory/qemu.log" 2>&1 3<&- & qemu=$!
echo $qemu
exec 2>/dev/null
{ read -r _; rm -rf "$directory"; kill -KILL $qemu; } <&3 >/dev/null & reader=$!
exec 1>&-
wait $qemu; status=$?
kill $reader 2>/dev/null
exit $status
"""


class Machine:
    """A QEMU with its overlay disk and sockets in a directory of its own, which goes with it."""

    def __init__(
        self,
        layout: Layout,
        image: Image,
        *,
        payload: Path | None = None,
        saved: Path | None = None,
        forwards: Mapping[int, int] | None = None,
    ) -> None:
        """`payload`: what /dev/vdb starts with. `saved`: a saved machine to go on from."""
        self.directory = Path(tempfile.mkdtemp(prefix="corefleet-guest-"))
        self.pid = 0
        self._saved = saved
        self._payload = payload
        self._layout = layout
        self._console: socket.socket | None = None
        self._monitor: Monitor | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._attached = Attached(
            image=image,
            overlay=self.directory / DISK,
            payload=self.directory / PAYLOAD if payload is not None else None,
            monitor=self.directory / "monitor",
            console=self.directory / "console",
            console_log=self.directory / CONSOLE_LOG,
            forwards=dict(forwards or {}),
            restores=saved is not None,
        )

    def __enter__(self) -> Machine:
        try:
            self._start()
        except BaseException:  # interrupted, too: __exit__ is not called then
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End QEMU and remove its directory. May be called twice."""
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            keeper.stdin.close()
            keeper.stdout.close()
            try:
                keeper.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired as error:
                keeper.kill()
                keeper.wait()
                raise GuestError(f"QEMU {self.pid} did not end") from error
        if self._monitor is not None:
            self._monitor.close()
        if self._console is not None:
            self._console.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def wait_booted(self, timeout_s: float) -> None:
        """Return when the console says that ssh answers; raises GuestError."""
        assert self._console is not None
        deadline = time.monotonic() + timeout_s
        seen = b""
        while READY.encode() not in seen:
            self._console.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                data = self._console.recv(65536)
            except TimeoutError as error:
                raise GuestError(
                    f"the guest was not ready within {timeout_s:.0f} s; {self.said()}"
                ) from error
            if not data:
                raise GuestError(f"QEMU ended while the guest started; {self.said()}")
            seen = seen[-len(READY) :] + data
        self._leave_console()

    def save(self, into: Path) -> None:
        """Stop the machine and move its state and disk into the directory `into`."""
        monitor = self._running()
        monitor.execute("stop")
        self._events_of_migration()
        monitor.execute("migrate-set-parameters", **{"max-bandwidth": 10 << 30})
        monitor.execute("migrate", uri=f"exec:cat > '{into / STATE}'")
        monitor.wait_migrated(_STATE_LIMIT_S)
        monitor.execute("quit")
        if self._keeper is not None:
            self._keeper.wait(_END_LIMIT_S)
        for disk in (self._attached.overlay, self._attached.payload):
            if disk is not None:
                shutil.move(disk, into / disk.name)
        self.close()

    def freeze(self) -> None:
        """Stop the guest's time as a machine that hangs does."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Cut the guest's power."""
        os.kill(self.pid, signal.SIGKILL)
        if self._keeper is not None:
            self._keeper.wait(_END_LIMIT_S)

    def said(self) -> str:
        """Return the last lines of QEMU and of the console, for messages."""
        lines = []
        for name in ("qemu.log", CONSOLE_LOG):
            with contextlib.suppress(FileNotFoundError):
                text = (self.directory / name).read_text("utf-8", "replace")
                lines += [f"{name}: {line}" for line in text.splitlines()[-_TAIL_LINES:]]
        return "\n".join(["it said:", *lines]) if lines else "it said nothing"

    def _overlay(self, file: Path, original: Path) -> None:
        """Make a disk that starts as `original`, or as it was saved."""
        backing, form = (self._saved / file.name, "qcow2") if self._saved else (original, "raw")
        run(
            [program("qemu-img"), "create", "-q", "-f", "qcow2", "-b", backing, "-F", form, file],
            self.directory / "qemu-img.log",
            _START_LIMIT_S,
        )

    def _start(self) -> None:
        self._overlay(self._attached.overlay, self._attached.image.disk)
        if self._attached.payload is not None and self._payload is not None:
            self._overlay(self._attached.payload, self._payload)
        with _listening(self._attached.monitor) as m, _listening(self._attached.console) as c:
            self._keeper = subprocess.Popen(
                ["/bin/sh", "-c", _KEEPER, "guest", str(self.directory),
                 *qemu_command(self._layout, self._attached)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
            )  # fmt: skip
            assert self._keeper.stdout is not None
            self.pid = int(self._keeper.stdout.readline())
            monitor, self._console = self._accept(m), self._accept(c)
        try:
            self._monitor = Monitor(monitor)
        except GuestError as error:
            monitor.close()
            raise GuestError(f"QEMU did not start ({error}); {self.said()}") from error
        if self._saved is not None:
            self._leave_console()
            self._events_of_migration()
            self._monitor.execute("migrate-incoming", uri=f"exec:cat '{self._saved / STATE}'")
            self._monitor.wait_migrated(_STATE_LIMIT_S)
            self._monitor.execute("cont")

    def _accept(self, listener: socket.socket) -> socket.socket:
        """Return QEMU's connection; raises GuestError if it does not come."""
        deadline = time.monotonic() + _START_LIMIT_S
        while True:
            ready, _, _ = select.select([listener], [], [], 0.2)
            if ready:
                return listener.accept()[0]
            if self._keeper is not None and self._keeper.poll() is not None:
                raise GuestError(f"QEMU did not start; {self.said()}")
            if time.monotonic() > deadline:
                raise GuestError(f"QEMU does not connect; {self.said()}")

    def _events_of_migration(self) -> None:
        self._running().execute(
            "migrate-set-capabilities", capabilities=[{"capability": "events", "state": True}]
        )

    def _leave_console(self) -> None:
        """Let the console go on into its log only: nobody reads the socket any more."""
        if self._console is not None:
            self._console.close()
            self._console = None

    def _running(self) -> Monitor:
        if self._monitor is None:
            raise GuestError("the machine is not running")
        return self._monitor


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(1)
    return listener
