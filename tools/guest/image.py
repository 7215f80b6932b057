"""The guest's disk image: a small Debian with systemd, a kernel and an initrd.

Made by mmdebstrap from the host's own apt sources, and kept in the cache under a key of
this module's text: whatever changes the image is written here.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools import etcd_fetch
from tools.guest.cache import LOG, key_of, made_once
from tools.guest.errors import GuestError
from tools.guest.host import PACKAGES, need, program, run

Arch = Literal["amd64", "arm64"]

SUITE = "bookworm"
PYTHON = "3.11"
"""The suite's Python."""
IMAGE_SIZE = "6G"
"""Of a sparse file: room for what tests install and write."""
KERNELS = {"amd64": "linux-image-cloud-amd64", "arm64": "linux-image-cloud-arm64"}
INCLUDED = (
    "systemd", "systemd-sysv", "dbus", "udev", "kmod", "openssh-server", "python3",
    "python3-venv", "numactl", "iproute2", "procps", "util-linux", "ca-certificates",
    "initramfs-tools",
)  # fmt: skip
READY = "corefleet-guest-ready"
"""What the console shows when ssh answers."""

_BOOTSTRAP_LIMIT_S = 900.0
_EMULATED_LIMIT_S = 2400.0
_STEP_LIMIT_S = 300.0
_LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*")
# A restored guest's clock jumps by hours: no timer may take that for its hour.
_TIMERS = (
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer",
    "fstrim.timer", "logrotate.timer", "systemd-tmpfiles-clean.timer",
)  # fmt: skip
_MASKED = (*_TIMERS, "e2scrub_reap.service", "systemd-networkd-wait-online.service")

FILES = {
    "etc/hostname": "guest\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 guest\n",
    "etc/fstab": "/dev/vda / ext4 rw,noatime 0 1\n",
    "etc/machine-id": "",
    "etc/resolv.conf": "nameserver 10.0.2.3\n",
    "etc/systemd/network/10-user.network": (
        "[Match]\nName=e*\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n"
        "DNS=10.0.2.3\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    ),
    "etc/systemd/journald.conf.d/guest.conf": ("[Journal]\nStorage=volatile\nRateLimitBurst=0\n"),
    "etc/ssh/sshd_config.d/guest.conf": (
        "UseDNS no\nPermitRootLogin prohibit-password\nMaxSessions 50\n"
    ),
    "etc/systemd/system/guest-ready.service": (
        "[Unit]\nAfter=ssh.service\n[Service]\nType=oneshot\nStandardOutput=tty\n"
        f"TTYPath=/dev/console\nExecStart=/bin/echo {READY}\n"
        "[Install]\nWantedBy=multi-user.target\n"
    ),
}


@dataclass(frozen=True, slots=True)
class Image:
    """A directory of the cache with everything to boot."""

    directory: Path

    @property
    def disk(self) -> Path:
        """The root file system, raw; never written to."""
        return self.directory / "root.ext4"

    @property
    def kernel(self) -> Path:
        return self.directory / "vmlinuz"

    @property
    def initrd(self) -> Path:
        return self.directory / "initrd.img"

    @property
    def identity(self) -> Path:
        """root's private ssh key."""
        return self.directory / "id_ed25519"

    @property
    def key(self) -> str:
        return self.directory.name


def image_key(arch: Arch) -> str:
    """Return the digest of the recipe, which is this module, for `arch`."""
    return f"image-{arch}-{key_of(Path(__file__).read_bytes(), arch)}"


def ensure_image(arch: Arch = "amd64", *, cache: Path | None = None) -> Image:
    """Return the image, made from the network if it is not cached (about 100 s); needs root.

    An arm64 image must be made where the kernel runs arm64 programs: see tools.guest.arm64.
    Raises GuestError.
    """
    return Image(made_once(image_key(arch), lambda scratch: _make(arch, scratch), cache))


def bootstrap_command(arch: Arch, sources: Sequence[Path], rootfs: Path) -> list[str | Path]:
    """Return the command line of mmdebstrap."""
    return [
        *(program("mmdebstrap"), "--quiet", "--mode=root", "--variant=minbase"),
        f"--architectures={arch}",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT),
        '--aptopt=Apt::Install-Recommends "false"',
        '--aptopt=Acquire::Check-Valid-Until "false"',
        f"--include={','.join((*INCLUDED, KERNELS[arch]))}",
        SUITE,
        rootfs,
        *sources,
    ]


def write_sources(into: Path, apt: Path = etcd_fetch.APT_SOURCES) -> list[Path]:
    """Write the host's sources of Debian, turned to our suite, and return their files.

    None on a host that is no Debian: mmdebstrap then takes its own default.
    """
    host_suite = etcd_fetch.os_release().get("VERSION_CODENAME", "")
    found: dict[str, etcd_fetch.Source] = {}
    for source in etcd_fetch.read_sources(apt):
        if "main" in source.components:
            if any(suite == SUITE or suite.startswith(f"{SUITE}-") for suite in source.suites):
                found.setdefault(source.text, source)
            elif host_suite in source.suites:
                moved = source.for_suite(SUITE)
                found.setdefault(moved.text, moved)
    files = []
    for number, source in enumerate(found.values()):
        file = into / f"{number}-{source.file}"
        file.write_text(source.text, encoding="utf-8")
        files.append(file)
    return files


def _make(arch: Arch, scratch: Path) -> None:
    need(PACKAGES)
    if os.geteuid() != 0:
        raise GuestError("building the guest's image needs root")
    print(f"building the guest's image for {arch} once and caching it", file=sys.stderr, flush=True)
    log = scratch / LOG
    rootfs = scratch / "rootfs"
    limit_s = _BOOTSTRAP_LIMIT_S if arch == "amd64" else _EMULATED_LIMIT_S
    run(bootstrap_command(arch, write_sources(scratch), rootfs), log, limit_s)
    key = scratch / "id_ed25519"
    run([program("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", key], log, _STEP_LIMIT_S)
    _configure(rootfs, key.with_suffix(".pub").read_text("utf-8"), log)
    for name, pattern in (("vmlinuz", "vmlinuz-*"), ("initrd.img", "initrd.img-*")):
        kernels = list((rootfs / "boot").glob(pattern))
        if len(kernels) != 1:
            raise GuestError(f"the image has {len(kernels)} of /boot/{pattern}, not one")
        shutil.copyfile(kernels[0], scratch / name)
    make_ext4(rootfs, scratch / "root.ext4", IMAGE_SIZE, log)
    shutil.rmtree(rootfs)


def _configure(rootfs: Path, public_key: str, log: Path) -> None:
    for name, text in {**FILES, "root/.ssh/authorized_keys": public_key}.items():
        file = rootfs / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_text(text, encoding="utf-8")
    (rootfs / "root/.ssh").chmod(0o700)
    (rootfs / "root/.ssh/authorized_keys").chmod(0o600)
    for command in (
        ("systemctl", "enable", "systemd-networkd", "ssh", "guest-ready"),
        ("systemctl", "mask", *_MASKED),
        ("passwd", "-d", "root"),
    ):
        run([program("chroot"), rootfs, *command], log, _STEP_LIMIT_S)


def make_ext4(tree: Path, image: Path, size: str, log: Path) -> None:
    """Make a sparse ext4 image with a copy of `tree`."""
    run(["truncate", "-s", size, image], log, _STEP_LIMIT_S)
    lazy = "lazy_itable_init=1,lazy_journal_init=1"
    run(
        [program("mkfs.ext4"), "-q", "-F", "-E", lazy, "-d", tree, image],
        log,
        _STEP_LIMIT_S,
    )
