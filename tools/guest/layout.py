"""What a guest's machine looks like, and QEMU's command line for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.guest.cache import key_of
from tools.guest.host import program
from tools.guest.image import Arch, Image

LOOPBACK = "127.0.0.1"
HOST_ADDRESS = "10.0.2.2"
"""Where a guest finds the host's loopback address (QEMU's user network)."""
SSH_PORT = 22

_HERE, _NEAR, _FAR = 10, 21, 31
_APPEND = (
    "root=/dev/vda rw quiet net.ifnames=0 psi=1 mitigations=off systemd.show_status=auto "
    "fsck.mode=skip"
)
# Translated code: 512 MiB hold a busy guest's without throwing any away.
_TCG = "tcg,thread=multi,tb-size=512"


@dataclass(frozen=True, slots=True)
class Layout:
    """Nodes, CPUs and memory. Nodes 2k and 2k+1 are near each other, all others far."""

    nodes: int = 4
    cpus_per_node: int = 1
    node_memory_mb: int = 640
    arch: Arch = "amd64"

    @property
    def cpus(self) -> int:
        return self.nodes * self.cpus_per_node

    def cpus_of(self, node: int) -> range:
        return range(node * self.cpus_per_node, (node + 1) * self.cpus_per_node)

    def distance(self, node: int, other: int) -> int:
        """Return the distance as the firmware's SLIT has it: 10 is local."""
        if node == other:
            return _HERE
        return _NEAR if node // 2 == other // 2 else _FAR

    @property
    def key(self) -> str:
        """Digest of everything that a saved state depends on."""
        return key_of(json.dumps(asdict(self)), Path(__file__).read_bytes())


@dataclass(frozen=True, slots=True)
class Attached:
    """What one run of a machine is connected to."""

    image: Image
    overlay: Path
    """qcow2 that takes the guest's writes."""
    payload: Path | None
    """A second one, of another disk."""
    monitor: Path
    """Socket where we listen and QEMU connects."""
    console: Path
    """The same for the console."""
    console_log: Path
    forwards: Mapping[int, int] = field(default_factory=dict)
    """From a port of the host's loopback address to a port of the guest."""
    restores: bool = False
    """Wait for a saved state instead of booting."""


def qemu_command(layout: Layout, attached: Attached) -> list[str]:
    """Return QEMU's command line."""
    arm = layout.arch == "arm64"
    memory = layout.nodes * layout.node_memory_mb
    network = ",".join(
        ["user", "id=n0", *(f"hostfwd=tcp:{LOOPBACK}:{host}-:{inside}"
                            for host, inside in attached.forwards.items())]
    )  # fmt: skip
    command = [
        program("qemu-system-aarch64" if arm else "qemu-system-x86_64"),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-machine", "virt,gic-version=3" if arm else "q35", "-accel", _TCG),
        *("-cpu", "cortex-a76" if arm else "max"),
        *("-smp", f"{layout.cpus},sockets={layout.nodes},cores={layout.cpus_per_node},threads=1"),
        *("-m", str(memory), *_numa(layout)),
        *("-kernel", str(attached.image.kernel), "-initrd", str(attached.image.initrd)),
        *("-append", f"{_APPEND} console={'ttyAMA0' if arm else 'ttyS0'}"),
        *_disk("root", attached.overlay),
        *("-netdev", network, "-device", "virtio-net-pci,netdev=n0,romfile="),
        *("-device", "virtio-rng-pci"),
        *("-chardev", f"socket,id=monitor,path={attached.monitor}"),
        *("-mon", "chardev=monitor,mode=control"),
        *("-chardev", f"socket,id=console,path={attached.console},logfile={attached.console_log}"),
        *("-serial", "chardev:console"),
    ]
    if attached.payload is not None:
        command += _disk("payload", attached.payload)
    if attached.restores:
        command += ["-incoming", "defer"]
    return command


def _numa(layout: Layout) -> list[str]:
    options = []
    for node in range(layout.nodes):
        cpus = layout.cpus_of(node)
        options += [
            *("-object", f"memory-backend-ram,id=m{node},size={layout.node_memory_mb}M"),
            *("-numa", f"node,nodeid={node},cpus={cpus[0]}-{cpus[-1]},memdev=m{node}"),
        ]
    for node in range(layout.nodes):
        for other in range(layout.nodes):
            distance = layout.distance(node, other)
            options += ["-numa", f"dist,src={node},dst={other},val={distance}"]
    return options


def _disk(name: str, file: Path) -> list[str]:
    drive = f"file={file},if=none,id={name},format=qcow2,cache=unsafe,discard=unmap"
    return ["-drive", drive, "-device", f"virtio-blk-pci,drive={name}"]
