"""What this node's next agentd must know of this one: its epoch, kept until the next boot."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import structlog

from agentd.hostfs import HostFs

_FILE = "standing.json"

_log = structlog.get_logger(__name__)


class Standing(msgspec.Struct, frozen=True):
    """The epoch at which a node registered, and the boot in which it did."""

    node: str
    epoch: int
    boot: str


def load(directory: Path, node: str, host: HostFs) -> int:
    """Return the epoch that `node` may resume, 0 when there is none. Blocks."""
    try:
        standing = msgspec.json.decode((directory / _FILE).read_bytes(), type=Standing)
    except FileNotFoundError:
        return 0
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("Standing not read: the node begins anew", reason=str(error))
        return 0
    boot = _boot(host)
    return standing.epoch if boot and (standing.node, standing.boot) == (node, boot) else 0


def save(directory: Path, node: str, epoch: int, host: HostFs) -> None:
    """Keep `epoch` for the next agentd of this boot; raises OSError. Blocks."""
    directory.mkdir(parents=True, exist_ok=True)
    fresh = directory / f".{_FILE}"
    fresh.write_bytes(msgspec.json.encode(Standing(node=node, epoch=epoch, boot=_boot(host))))
    os.replace(fresh, directory / _FILE)


def _boot(host: HostFs) -> str:
    return (host.read("proc/sys/kernel/random/boot_id") or "").strip()
