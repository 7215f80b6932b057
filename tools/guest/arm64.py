"""An aarch64 guest on an x86-64 host: everything in it is emulated, also while it is built.

Building runs the architecture's own programs by qemu-user. The kernel is told of that in a
user namespace of the build's own (Linux 6.7: binfmt_misc is per user namespace), so that
the host stays as it is.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from agentd.core.cpulist import format_list
from tools.guest import install, payload
from tools.guest.cache import LOG, guest_cache
from tools.guest.errors import GuestError
from tools.guest.guest import BIN, Guest
from tools.guest.host import ARM64_PACKAGES, need, program
from tools.guest.image import Image, image_key
from tools.guest.layout import Layout
from tools.guest.prepare import booted
from tools.guest.steps import Steps

LAYOUT = Layout(nodes=2, cpus_per_node=2, node_memory_mb=1024, arch="arm64")

# name:type:offset:magic:mask:interpreter:flags, as the kernel's binfmt-misc.rst has it: ELF,
# 64 bits, little-endian, executable, EM_AARCH64 (183). F: opened now, for other roots too.
_AARCH64 = (
    r":qemu-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:%s:F"
)
_NAMESPACE = """
echo ready; read -r _
exec setpriv --reuid 0 --regid 0 --clear-groups \
    unshare --mount --pid --fork --kill-child /bin/sh -c "$1" build "$2" "$3"
"""
_BUILD = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
printf %s "$1" >/proc/sys/fs/binfmt_misc/register
exec "$2" -c 'from tools.guest.image import ensure_image; ensure_image("arm64")'
"""
_BUILD_LIMIT_S = 3000.0


def ensure_arm64_image() -> Image:
    """Return the image, built if it is not cached (about 8 minutes); raises GuestError."""
    directory = guest_cache() / image_key("arm64")
    if not directory.is_dir():
        need(ARM64_PACKAGES)
        _build_in_namespace()
    return Image(directory)


def smoke(steps: Steps) -> Iterator[str]:
    """Boot, check discovery and binding, and yield what was seen; raises GuestError."""
    need(["qemu-system-aarch64"])
    with steps.step("image for arm64"):
        image = ensure_arm64_image()
    with steps.step("packages for arm64"):
        packages = payload.ensure_payload("aarch64")
    with (
        tempfile.TemporaryDirectory() as scratch,
        booted(LAYOUT, image, packages / payload.DISK, steps) as guest,
    ):
        site = Path(scratch) / "site"
        payload.lay_out_project(site, Path(scratch) / LOG, "aarch64")
        install.install_dependencies(guest)
        install.install_project(guest, site, steps)
        with steps.step("discover"):
            yield _check_discovery(guest)
        with steps.step("bind"):
            yield _check_binding(guest)


def _check_discovery(guest: Guest) -> str:
    found = json.loads(guest.must(f"{BIN}/agentd discover --json", 120))
    distances = {
        str(node): {str(other): LAYOUT.distance(node, other) for other in range(LAYOUT.nodes)}
        for node in range(LAYOUT.nodes)
    }
    seen = {node: domain["distances"] for node, domain in found["domains"].items()}
    cpus = {node: domain["cpus"] for node, domain in found["domains"].items()}
    wanted = {str(node): format_list(LAYOUT.cpus_of(node)) for node in range(LAYOUT.nodes)}
    if (found["arch"], seen, cpus) != ("aarch64", distances, wanted):
        raise GuestError(
            f"discovery found {found['arch']}, CPUs {cpus}, distances {seen}; "
            f"the machine is {LAYOUT}"
        )
    return f"discovery: {found['arch']}, CPUs {cpus}, distances {seen}"


def _check_binding(guest: Guest) -> str:
    said = guest.must(
        "numactl --physcpubind=2-3 --membind=1 "
        "grep -E 'Cpus_allowed_list|stack' /proc/self/status /proc/self/numa_maps"
    )
    if "2-3" not in said or "bind:1" not in said:
        raise GuestError(f"numactl did not bind to CPUs 2-3 and node 1: {said}")
    return "binding: CPUs 2-3, memory bind:1"


def _build_in_namespace() -> None:
    interpreter = program("qemu-aarch64-static")
    with subprocess.Popen(
        ["unshare", "--user", "/bin/sh", "-c", _NAMESPACE, "namespace", _BUILD,
         _AARCH64 % interpreter, sys.executable],
        cwd=payload.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{process.pid}/{name}").write_text("0 0 65536\n")
            process.stdin.write("go\n")
            process.stdin.close()
            code = process.wait(_BUILD_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise GuestError(f"the image did not build within {_BUILD_LIMIT_S:.0f} s") from error
        finally:
            process.kill()
    if code != 0:
        raise GuestError("the arm64 image did not build; see above")
