"""A running guest as tests use it: commands, files, events. Every method blocks."""

from __future__ import annotations

import os
import re
import select
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tools.guest.errors import GuestError
from tools.guest.host import program
from tools.guest.layout import LOOPBACK
from tools.guest.machine import Machine

BIN = "/opt/corefleet/current/bin"
"""Where a prepared guest has agentd, agentctl, controld and their Python."""

_CONNECT_LIMIT_S = 60.0
_SLACK_S = 15.0
_TIMED_OUT = 124
_SHOWN = 2000


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


class Guest:
    """Root's session on a machine, over one ssh connection."""

    def __init__(self, machine: Machine, identity: Path, ssh_port: int) -> None:
        self.machine = machine
        self.ssh_port = ssh_port
        self._identity = identity
        self._socket = machine.directory / "ssh"
        self._master: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Guest:
        try:
            self._connect()
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
        """Leave the guest; the machine goes on."""
        if self._master is not None:
            master, self._master = self._master, None
            if master.stdout is not None:
                master.stdout.close()
            master.kill()
            master.wait()

    def run(self, command: str, timeout_s: float = 60.0) -> Result:
        """Run a bash command to its end; raises GuestError if that takes too long.

        Then the command is ended in the guest too.
        """
        return self._ssh(_limited(command, timeout_s), command, timeout_s)

    def must(self, command: str, timeout_s: float = 60.0) -> str:
        """Run a bash command that has to succeed and return its stripped output."""
        result = self.run(command, timeout_s)
        if result.code != 0:
            raise GuestError(
                f"in the guest, {_short(command)} ended with {result.code}:\n"
                f"{result.out[-_SHOWN:]}{result.err[-_SHOWN:]}"
            )
        return result.out.strip()

    def put(self, path: str, text: str | bytes, mode: int = 0o644) -> None:
        """Write a file, its directories made where they are missing."""
        data = text.encode() if isinstance(text, str) else text
        quoted = shlex.quote(path)
        command = f'mkdir -p "$(dirname {quoted})" && cat >{quoted} && chmod {mode:o} {quoted}'
        limit_s = _CONNECT_LIMIT_S + len(data) / 1e6
        result = self._ssh(_limited(command, limit_s), f"put {path}", limit_s, data)
        if result.code != 0:
            raise GuestError(f"could not write {path} in the guest: {result.err}")

    def put_tree(self, directory: Path, path: str) -> None:
        """Copy what is in a directory of the host into `path`; 5 MB take a second."""
        packed = subprocess.run(
            ["tar", "-C", directory, "-czf", "-", "."],
            capture_output=True,
            check=True,
        ).stdout
        quoted = shlex.quote(path)
        command = f"mkdir -p {quoted} && tar -C {quoted} --no-same-owner -xzf -"
        limit_s = _CONNECT_LIMIT_S + len(packed) / 1e6
        result = self._ssh(_limited(command, limit_s), f"put {path}", limit_s, packed)
        if result.code != 0:
            raise GuestError(f"could not copy {directory} to {path} in the guest: {result.err}")

    def get(self, path: str) -> str:
        """Return a file's text; raises GuestError if there is none."""
        result = self.run(f"cat {shlex.quote(path)}")
        if result.code != 0:
            raise GuestError(f"no {path} in the guest: {result.err}")
        return result.out

    def read(self, path: str) -> str:
        """Return a small file's text, stripped."""
        return self.get(path).strip()

    def wait_for(self, command: str, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """Follow a command's output and return the first match of `pattern` in a line.

        The command is one that prints when something happens: `journalctl -f`, `tail -F`,
        `busctl monitor`. It is ended then. Raises GuestError with what was seen if it ends
        or the time is over before.
        """
        wanted = re.compile(pattern)
        deadline = time.monotonic() + timeout_s
        with subprocess.Popen(
            self._argv(_limited(command, timeout_s)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            seen = ""
            try:
                while True:
                    left = deadline - time.monotonic()
                    ready, _, _ = select.select([process.stdout], [], [], max(left, 0))
                    data = os.read(process.stdout.fileno(), 65536) if ready else b""
                    seen += data.decode("utf-8", "replace")
                    for line in seen.splitlines():
                        found = wanted.search(line)
                        if found is not None:
                            return found
                    if not data:
                        raise GuestError(
                            f"no line of {_short(command)} matched {pattern!r} within "
                            f"{timeout_s:.0f} s; seen:\n{seen[-_SHOWN:]}"
                        )
            finally:
                process.kill()

    def wait_for_journal(self, unit: str, pattern: str, timeout_s: float = 60.0) -> re.Match[str]:
        """Return the first match in a unit's journal of this boot, what systemd says included."""
        unit = shlex.quote(unit)
        return self.wait_for(f"journalctl -b -o cat -f -n all -u {unit}", pattern, timeout_s)

    def journal(self, unit: str) -> str:
        """Return a unit's journal of this boot."""
        return self.must(f"journalctl -b -o short-monotonic --no-pager -u {shlex.quote(unit)}")

    def ssh_command(self) -> list[str]:
        """Return the command line of a new ssh connection, for use by hand."""
        return [
            *(program("ssh"), "-F", "/dev/null", "-i", str(self._identity)),
            *("-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"),
            *("-o", "IdentitiesOnly=yes", "-o", "LogLevel=ERROR"),
            *("-p", str(self.ssh_port), f"root@{LOOPBACK}"),
        ]

    def _connect(self) -> None:
        """Open the connection that all commands go through."""
        own = self.ssh_command()
        options = [
            *("-M", "-N", "-S", str(self._socket), "-o", "BatchMode=yes"),
            *("-o", f"ConnectTimeout={_CONNECT_LIMIT_S:.0f}", "-o", "ServerAliveInterval=0"),
            *("-o", "PermitLocalCommand=yes", "-o", "LocalCommand=echo connected"),
        ]
        self._master = subprocess.Popen(
            [own[0], *options, *own[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
        assert self._master.stdout is not None
        # ssh runs LocalCommand once its socket takes other sessions.
        ready, _, _ = select.select([self._master.stdout], [], [], _CONNECT_LIMIT_S)
        said = os.read(self._master.stdout.fileno(), 65536).decode() if ready else "nothing"
        if "connected" not in said:
            raise GuestError(f"ssh does not connect; it said: {said}{self.machine.said()}")

    def _argv(self, command: str) -> list[str]:
        return [
            *(program("ssh"), "-F", "/dev/null", "-S", str(self._socket)),
            *("-o", "ControlMaster=no", "-o", "BatchMode=yes", LOOPBACK, command),
        ]

    def _ssh(self, command: str, what: str, timeout_s: float, data: bytes = b"") -> Result:
        try:
            done = subprocess.run(
                self._argv(command),
                input=data,
                capture_output=True,
                timeout=timeout_s + _SLACK_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise GuestError(f"the guest does not answer: {_short(what)}") from error
        if done.returncode == _TIMED_OUT:
            raise GuestError(
                f"in the guest, {_short(what)} did not end within {timeout_s:.0f} s:\n"
                f"{done.stdout.decode('utf-8', 'replace')[-_SHOWN:]}"
            )
        return Result(
            done.returncode,
            done.stdout.decode("utf-8", "replace"),
            done.stderr.decode("utf-8", "replace"),
        )


def _limited(command: str, timeout_s: float) -> str:
    return f"timeout -k 5 {timeout_s:.0f} bash -c {shlex.quote(command)}"


def _short(command: str) -> str:
    return command if len(command) <= 100 else f"{command[:97]}..."
