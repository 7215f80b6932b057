"""Programs of the host: which ones guests need, and running them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tools.guest.errors import GuestError, MissingPrograms

PACKAGES: Mapping[str, str] = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "mkfs.ext4": "e2fsprogs",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
ARM64_PACKAGES: Mapping[str, str] = {
    "qemu-system-aarch64": "qemu-system-arm",
    "qemu-aarch64-static": "qemu-user-static",
    "arch-test": "arch-test",
    "unshare": "util-linux",
    "setpriv": "util-linux",
}
_SBIN = "/usr/sbin:/sbin"
_LAST_LINES = 15


def program(name: str) -> str:
    """Return the path of a program; raises MissingPrograms."""
    found = shutil.which(name) or shutil.which(name, path=_SBIN)
    if found is None:
        need([name])
        raise MissingPrograms(f"{name} is not installed")
    return found


def need(names: Iterable[str]) -> None:
    """Raise MissingPrograms, with the packages to install, unless all are there."""
    known = {**PACKAGES, **ARM64_PACKAGES}
    missing = [name for name in names if not (shutil.which(name) or shutil.which(name, path=_SBIN))]
    if missing:
        packages = sorted({known.get(name, name) for name in missing})
        raise MissingPrograms(
            f"missing: {', '.join(missing)}; install by: apt-get install {' '.join(packages)}"
        )


def run(
    argv: Sequence[str | Path],
    log: Path,
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Run a program to its end, its output appended to `log`; raises GuestError."""
    with log.open("a", encoding="utf-8") as out:
        print("+", *argv, file=out, flush=True)
        try:
            done = subprocess.run(
                [str(argument) for argument in argv],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                env=environment,
                cwd=cwd,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise GuestError(
                f"{argv[0]} did not end within {timeout_s:.0f} s; see {log}"
            ) from error
    if done.returncode != 0:
        tail = "\n".join(log.read_text("utf-8", "replace").splitlines()[-_LAST_LINES:])
        raise GuestError(f"{argv[0]} ended with {done.returncode}:\n{tail}\nsee {log}")
