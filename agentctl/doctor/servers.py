"""Checks of etcd and NATS from where agentctl runs, as a client with a configuration would."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from typing import Any
from urllib.parse import urlsplit

from agentctl.doctor.finding import Finding, error, ok, warning
from corefleet.config import EtcdConfig, NatsConfig, TlsConfig
from corefleet.errors import Unavailable

_PATIENCE_S = 3.0
_SLOW_S = 0.1
_OLDEST_NATS = (2, 12)
_NATS_PORT = 4222
_ANSWER_BYTES = 1 << 16


async def etcd(config: EtcdConfig) -> list[Finding]:
    """Ask every member for its version and health."""
    return list(await asyncio.gather(*(_member(each, config.tls) for each in config.endpoints)))


async def nats(config: NatsConfig) -> list[Finding]:
    """Read what every server says of itself when one connects."""
    return list(await asyncio.gather(*(_server(each, config.tls) for each in config.servers)))


async def _member(endpoint: str, tls: TlsConfig | None) -> Finding:
    check = f"etcd {endpoint}"
    began = time.monotonic()
    try:
        version = await _get(endpoint, "/version", tls)
        health = await _get(endpoint, "/health", tls)
    except Unavailable as failure:
        return error(
            check,
            str(failure),
            "see that it runs (`journalctl -u corefleet-etcd`), that this host may reach it, and "
            "that etcd.endpoints and etcd.tls are right",
        )
    took_s = time.monotonic() - began
    what = f"version {version.get('etcdserver', '?')}, answers in {took_s * 1000:.0f} ms"
    if str(health.get("health")).lower() != "true":
        return error(
            check,
            f"{what}, not healthy: {health.get('reason') or 'no leader or an alarm'}",
            "ask `etcdctl endpoint status` and `etcdctl alarm list`; most members must live",
        )
    if took_s > _SLOW_S:
        return warning(check, what, "look at its disk (fsync) and at the network to it")
    return ok(check, what)


async def _server(url: str, tls: TlsConfig | None) -> Finding:
    check = f"nats {url}"
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    try:
        info = await _banner(parts.hostname or "", parts.port or _NATS_PORT)
    except Unavailable as failure:
        return error(
            check,
            str(failure),
            "see that it runs (`journalctl -u corefleet-nats`), that this host may reach it, and "
            "that nats.servers is right",
        )
    version = str(info.get("version", "?"))
    what = f"version {version}, server {info.get('server_name', '?')}"
    if _numbers(version) < _OLDEST_NATS:
        return error(check, what, "upgrade it to 2.12 or newer: older ones ignore what we rely on")
    if not info.get("jetstream"):
        return error(check, f"{what}, without JetStream", "enable `jetstream` in its configuration")
    if bool(info.get("tls_required")) != (tls is not None):
        asks = "asks for TLS" if info.get("tls_required") else "speaks plain text"
        ours = "has [nats.tls]" if tls is not None else "has no [nats.tls]"
        return error(check, f"{what}, {asks}; the configuration {ours}", "make both the same")
    return ok(check, what)


async def _banner(host: str, port: int) -> dict[str, Any]:
    """Return the INFO that a NATS server begins with. Raises Unavailable."""
    line = (await _exchange(host, port, b"", None)).partition(b"\r\n")[0]
    try:
        found = json.loads(line.removeprefix(b"INFO "))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unavailable(f"it is no NATS server: it began with {line[:40]!r}")
    return found


async def _get(endpoint: str, path: str, tls: TlsConfig | None) -> dict[str, Any]:
    """Return the JSON object behind `path` of an etcd member. Raises Unavailable."""
    host, _, port = endpoint.rpartition(":")
    request = f"GET {path} HTTP/1.0\r\nHost: {endpoint}\r\nConnection: close\r\n\r\n"
    context = None
    if tls is not None:
        try:
            context = ssl.create_default_context(cafile=tls.ca)
            context.load_cert_chain(tls.cert, tls.key)
        except (OSError, ssl.SSLError) as failure:
            raise Unavailable(f"etcd.tls: {failure}") from failure
    answer = await _exchange(host.strip("[]"), int(port), request.encode(), context)
    head, _, body = answer.partition(b"\r\n\r\n")
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unavailable(f"it is no etcd member: it answered {head[:40]!r}")
    return found


async def _exchange(host: str, port: int, request: bytes, tls: ssl.SSLContext | None) -> bytes:
    """Send `request`, return what comes until the other side closes; its first line without one."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
            try:
                if not request:
                    return await reader.readline()
                writer.write(request)
                await writer.drain()
                return await reader.read(_ANSWER_BYTES)
            finally:
                writer.transport.abort()
    except TimeoutError:
        raise Unavailable(f"no answer within {_PATIENCE_S:.0f} s") from None
    except OSError as failure:
        raise Unavailable(failure.strerror or str(failure)) from failure


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("-")[0].split(".")[:2] if part.isdecimal())
