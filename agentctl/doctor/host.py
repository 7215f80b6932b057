"""Checks of the machine that agentctl runs on. Programs of the system are asked, not files."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import psutil

from agentctl.doctor.finding import Finding, error, ok, skipped, warning

_ASK_S = 10.0
_LEAST_FREE_SHARE = 0.1
_LEAST_FREE_BYTES = 2 << 30
_OLDEST_SYSTEMD = 249
"""Of openEuler 22.03; older ones do not know the properties that workers are bound by."""


async def ask(*command: str) -> tuple[int, str]:
    """Run a program of the system; return its exit code and what it wrote, both stripped.

    127 when it is not there, 124 when it does not end within 10 s.
    """
    if shutil.which(command[0]) is None:
        return 127, f"{command[0]} is not installed"
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_ASK_S):
            out, _ = await process.communicate()
    except TimeoutError:
        return 124, f"{command[0]} did not end within {_ASK_S:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode("utf-8", "replace").strip()


async def clock() -> Finding:
    """Whether something keeps the clock right: times of logs and records rely on it."""
    code, said = await ask("timedatectl", "show", "-p", "NTPSynchronized", "--value")
    if code:
        return skipped("clock", said.partition("\n")[0])
    if said == "yes":
        return ok("clock", "synchronised")
    return warning(
        "clock",
        "nothing keeps this clock right",
        "run chrony or systemd-timesyncd, and look with `timedatectl timesync-status`",
    )


async def disk(check: str, path: Path) -> Finding:
    """Whether there is room where `path` lies or will lie."""
    there = next(each for each in (path, *path.parents) if each.exists())
    used = await asyncio.to_thread(psutil.disk_usage, str(there))
    free = f"{used.free / 2**30:.1f} GiB of {used.total / 2**30:.1f} free at {there}"
    if used.free < min(_LEAST_FREE_BYTES, _LEAST_FREE_SHARE * used.total):
        return error(check, free, f"make room on the file system of {there}")
    if used.free < _LEAST_FREE_SHARE * used.total:
        return warning(check, free, f"make room on the file system of {there} soon")
    return ok(check, free)


async def systemd() -> Finding:
    """Whether systemd is there, and new enough to bind workers."""
    code, said = await ask("systemctl", "--version")
    words = said.split()
    if code or len(words) < 2 or not words[1].isdecimal():
        return warning("systemd", said or "no answer", 'use launcher = "plain" where it is missing')
    if int(words[1]) < _OLDEST_SYSTEMD:
        return error(
            "systemd",
            f"version {words[1]}",
            f"upgrade it to {_OLDEST_SYSTEMD} or newer, or use launcher = 'plain'",
        )
    return ok("systemd", f"version {words[1]}")


def cgroups(version: int, hybrid: bool) -> Finding:
    """Whether control groups of version 2 alone are mounted, as discovery found them."""
    if version == 2 and not hybrid:
        return ok("cgroups", "version 2")
    return error(
        "cgroups",
        f"version {version}{' in part' if hybrid else ''}: limits would be taken and not kept",
        "boot with systemd.unified_cgroup_hierarchy=1",
    )


async def unit(name: str) -> Finding:
    """Whether a unit of systemd runs."""
    code, said = await ask("systemctl", "is-active", name)
    if code in (127, 124) or "not been booted with systemd" in said:
        return skipped(name, said.partition("\n")[0])
    if said == "active":
        return ok(name, said)
    return error(name, said, f"see why with `journalctl -u {name} -n 50`, then start it")


def program(name: str, package: str) -> Finding:
    """Whether a program that we start is installed."""
    found = shutil.which(name)
    if found is None:
        return error(name, "not installed", f"install the package {package}")
    return ok(name, found)
