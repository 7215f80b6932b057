"""The tmpfs that a domain's models lie in: mounted by systemd, or by mount(8) without it.

Mounted with `mpol=bind:N` (Documentation/filesystems/tmpfs.rst of Linux): whoever writes, the
pages go to node N, if the writer's cpuset has it. Where and how pages went is for the filler
to see; here it is only known what is mounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Protocol

import structlog
from dbus_fast import Variant

from agentd.filler.mounted import MARGIN_BYTES, mount_at, mount_size, wrong_mount
from agentd.hostfs import HostFs
from corefleet.errors import LaunchFailed

SMALLEST_HUGE_BYTES = 512 << 20
"""A huge page of a kernel with pages of 64K: smaller models have no use for one."""

_LARGE_PAGE_BYTES = 1 << 16
_SHMEM_HUGE = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
_JOB_S = 30.0
_OPTIONS = "nosuid,nodev,noexec,mode=0755"
_SLICE = "corefleet-models.slice"
MOUNT_DESCRIPTION = "corefleet models at"

_log = structlog.get_logger(__name__)


class MountUnits(Protocol):
    """What is asked of systemd: `agentd.launch.bus.Systemd` is one."""

    async def start_transient(
        self, unit: str, properties: tuple[tuple[str, Variant], ...], timeout_s: float
    ) -> str: ...

    async def stop(self, unit: str, timeout_s: float) -> str: ...

    async def manager(self, member: str, signature: str = "", *body: object) -> list[Any]: ...


class Mounts(Protocol):
    """Who mounts a domain's tmpfs."""

    async def mount(self, at: Path, domain: int, size: int, huge: bool) -> int:
        """Mount a tmpfs of `size` bytes bound to `domain`, or use the one there is.

        Returns its size in bytes: one that is in use and smaller stays as it is. Raises
        LaunchFailed.
        """

    async def unmount(self, at: Path) -> None:
        """Remove the mount; no matter if there is none. Raises LaunchFailed, e.g. it is in use."""

    async def leave(self, at: Path) -> None:
        """Remove the mount unless it stays for the next agentd: this one ends."""


class SystemdMounts:
    """Mounts as transient .mount units: PID 1's namespace, so that every unit sees them."""

    def __init__(self, systemd: MountUnits, host: HostFs) -> None:
        self._systemd = systemd
        self._host = host

    async def mount(self, at: Path, domain: int, size: int, huge: bool) -> int:
        return await _mount(self, self._host, at, domain, size, huge)

    async def unmount(self, at: Path) -> None:
        unit = mount_unit_name(at)
        with contextlib.suppress(LaunchFailed):
            await self._systemd.stop(unit, _JOB_S)
        if mount_at(self._host, at) is not None:
            raise LaunchFailed(f"{at}: {unit} cannot be stopped; is the mount in use?")

    async def leave(self, at: Path) -> None:
        return

    async def make(self, at: Path, options: str) -> None:
        unit = mount_unit_name(at)
        with contextlib.suppress(LaunchFailed):
            # One that failed before stands in the way; most often there is none.
            await self._systemd.manager("ResetFailedUnit", "s", unit)
        properties = (
            ("Description", Variant("s", f"{MOUNT_DESCRIPTION} {at}")),
            ("What", Variant("s", "tmpfs")),
            ("Type", Variant("s", "tmpfs")),
            ("Options", Variant("s", options)),
            ("Slice", Variant("s", _SLICE)),
            ("CollectMode", Variant("s", "inactive-or-failed")),
        )
        result = await self._systemd.start_transient(unit, properties, _JOB_S)
        if result != "done":
            raise LaunchFailed(f"{at}: {unit} did not start: job {result}; see its journal")


class PlainMounts:
    """Mounts with mount(8), for machines without systemd; needs CAP_SYS_ADMIN.

    They are unmounted when agentd ends; what a killed one left is used by the next.
    """

    def __init__(self, host: HostFs) -> None:
        self._host = host

    async def mount(self, at: Path, domain: int, size: int, huge: bool) -> int:
        return await _mount(self, self._host, at, domain, size, huge)

    async def unmount(self, at: Path) -> None:
        if mount_at(self._host, at) is None:
            return
        said = await asyncio.to_thread(_run, "umount", str(at))
        if said is not None:
            raise LaunchFailed(f"{at}: umount says: {said}")

    async def make(self, at: Path, options: str) -> None:
        try:
            await asyncio.to_thread(at.mkdir, parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchFailed(f"{at}: cannot be made: {error}") from error
        said = await asyncio.to_thread(
            _run, "mount", "-t", "tmpfs", "-o", options, "tmpfs", str(at)
        )
        if said is not None:
            raise LaunchFailed(f"{at}: mount says: {said}")

    async def leave(self, at: Path) -> None:
        # Even if it is in use: its memory is freed with the last user.
        if mount_at(self._host, at) is None:
            return
        said = await asyncio.to_thread(_run, "umount", "--lazy", str(at))
        if said is not None:
            _log.error("A mount is left behind", at=str(at), reason=said)


def mount_unit_name(at: Path) -> str:
    """Return the unit of a mount point: systemd-escape(1), `--path --suffix=mount`."""
    text = "/".join(part for part in at.parts if part != "/")
    escaped = "".join(
        "-"
        if char == "/"
        else char
        if (char.isascii() and char.isalnum()) or char in ":_" or (char == "." and number)
        else "".join(f"\\x{byte:02x}" for byte in char.encode())
        for number, char in enumerate(text)
    )
    return f"{escaped or '-'}.mount"


def use_huge(host: HostFs, page_bytes: int, sizes: Iterable[int]) -> bool:
    """Whether models of these sizes (bytes) gain by `huge=within_size`, and the kernel has it."""
    text = host.attribute(_SHMEM_HUGE)
    if text is None or "[deny]" in text:
        return False
    return page_bytes < _LARGE_PAGE_BYTES or min(sizes, default=0) >= SMALLEST_HUGE_BYTES


def options_for(domain: int, size: int, huge: bool) -> str:
    """Return the mount options of a domain's tmpfs with room for `size` bytes of replicas."""
    more = ",huge=within_size" if huge else ""
    return f"{_OPTIONS},size={size + MARGIN_BYTES},mpol=bind:{domain}{more}"


class _Maker(Protocol):
    async def make(self, at: Path, options: str) -> None: ...

    async def unmount(self, at: Path) -> None: ...


async def _mount(maker: _Maker, host: HostFs, at: Path, domain: int, size: int, huge: bool) -> int:
    there = await asyncio.to_thread(mount_at, host, at)
    if there is not None:
        wrong = wrong_mount(there, domain)
        if wrong is None and mount_size(there) >= size:
            return size
        try:
            await maker.unmount(at)
        except LaunchFailed as error:
            if wrong is not None:
                raise LaunchFailed(f"{at}: {wrong}, and it cannot be unmounted: {error}") from error
            _log.warning("The models' mount stays small: it is in use", at=str(at))
            return mount_size(there)
    await maker.make(at, options_for(domain, size, huge))
    wrong = wrong_mount(await asyncio.to_thread(mount_at, host, at), domain)
    if wrong is not None:
        raise LaunchFailed(f"{at}: it was mounted, but {wrong}")
    return size


def _run(*command: str) -> str | None:
    """Run a command; return what it says when it fails. Blocks."""
    program = shutil.which(command[0])
    if program is None:
        return f"{command[0]} is not on PATH; install the package mount"
    try:
        ran = subprocess.run(
            (program, *command[1:]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_JOB_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ran.returncode == 0:
        return None
    said = ran.stderr.strip().splitlines()
    return said[0] if said else f"exit code {ran.returncode}"


def choose_mounts(
    wanted: Literal["auto", "always", "never"],
    domains: int,
    numa: bool,
    systemd: Mounts | None,
    plain: Mounts | None,
) -> tuple[Mounts | None, str]:
    """Return who mounts, or None and why nobody does.

    `systemd` None: another launcher is used; `plain` None: we may not mount. `auto` makes
    replicas where they gain something and nothing can be left behind: on several domains
    under systemd.
    """
    if wanted == "never":
        return None, "`model_replicas` is never"
    if not numa:
        return None, "the kernel has no NUMA nodes"
    if systemd is not None and (domains > 1 or wanted == "always"):
        return systemd, ""
    if wanted == "auto":
        reason = "there is one domain" if domains <= 1 else "the launcher is not systemd"
        return None, f"{reason}; engines share the file in the page cache"
    if plain is None:
        return None, "only root may mount"
    return plain, ""


def may_mount() -> bool:
    """Whether it is worth trying: mount(8) is there, and we are root."""
    return os.geteuid() == 0 and shutil.which("mount") is not None
