"""The probe of a node's own port: whether its agentd is there, or whether we could not look."""

from __future__ import annotations

import asyncio
import errno

from controld.core.liveness_io import Found

_LATE_SHARE = 2.0
"""A probe that took so many of its deadlines tells of our own event loop only."""

_OURS = frozenset(
    {
        *(errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL),
        *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),
        *(errno.EACCES, errno.EPERM),
    }
)
"""Errors of our own machine: no route or interface, no descriptors or memory, a local filter."""


async def probe(address: str, node: str, epoch: int, timeout_s: float) -> Found:
    """Return whether the agentd of `node` at `epoch` answers on `address` within the time.

    The question is the line `probe`, the answer `corefleet <node> <epoch>`.
    """
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return "nobody"
    clock = asyncio.get_running_loop().time
    began = clock()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"probe\n")
            line = await reader.readline()
    except TimeoutError:
        return "unable" if clock() - began >= _LATE_SHARE * timeout_s else "nobody"
    except OSError as error:
        return "unable" if error.errno in _OURS else "nobody"
    except ValueError:
        return "nobody"
    finally:
        if writer is not None:
            writer.transport.abort()
    return "alive" if line == f"corefleet {node} {epoch}\n".encode() else "nobody"
