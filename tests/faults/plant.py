"""A whole plant: 3 etcds, 3 NATS servers, 3 controlds, 4 nodes in 2 racks, and a client.

Each is on a host of its own (tests/faults/lan.py) that has its program's name, with
streams of 3 replicas. What is killed is started again in its place; `whole` says when
nothing of a fault is left.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from agentctl.local.processes import Child, descendants
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.servers import find_etcd, find_nats_server
from corefleet.client import Client
from corefleet.config import NatsConfig, pool_text
from corefleet.errors import CorefleetError
from corefleet.ids import shard_of
from corefleet.messages.records import ClusterSettings
from corefleet.subjects import Layout
from tests.faults import probes
from tests.faults.agents import LEDGER
from tests.faults.audit import Audit
from tests.faults.lan import Lan
from tests.faults.load import Load

ETCDS = ("etcd1", "etcd2", "etcd3")
NATS = ("nats1", "nats2", "nats3")
CONTROLDS = ("c1", "c2", "c3")
NODES = {"n1": "r1", "n2": "r1", "n3": "r2", "n4": "r2"}
CLIENT = "client"
CLUSTER = ClusterSettings(shards=16, streams=2, replicas=3)

SMALL_DISK_BYTES = 64 * 1024 * 1024

_ASK_S = 2.0
_CLOSE_S = 20.0
_START_S = 90.0
_WHOLE_S = 60.0
_LOOK_S = 0.05
_SERVER_READY = ("ready to serve client requests", "Server is ready")


class Plant:
    """The running plant; made by `running_plant`. `load` submits all the time."""

    def __init__(self, data: Path, lan: Lan) -> None:
        self.data = data
        self.lan = lan
        self.programs: dict[str, Child] = {}
        self.layout = Layout(CLUSTER.shards, CLUSTER.streams)
        for host in (*ETCDS, *NATS, *CONTROLDS, *NODES, CLIENT):
            lan.add(host)
        self.nats_urls = tuple(f"nats://{lan.address(host)}:4222" for host in NATS)
        self.addresses = [f"{lan.address(host)}:7070" for host in CONTROLDS]
        self.client = Client(self.addresses)
        self.load = Load(lan.inside(CLIENT), self.addresses)
        self.bus: NatsBus
        self.audit: Audit
        self.bus_errors: list[Exception] = []
        self.small_disks: set[str] = set()
        """NATS servers whose next start is on an empty disk of their own, gone with them."""
        self._open: list[Callable[[], Awaitable[None]]] = [self.client.close]

    async def start(self) -> None:
        """Start everything and wait until it is whole."""
        await asyncio.gather(*(self.start_program(host) for host in (*ETCDS, *NATS)))
        await self._until(self._nats_has_leader, "JetStream has a leader")
        self.bus = await NatsBus.connect(
            NatsConfig(self.nats_urls), "the test", self.bus_errors.append
        )
        self._open.append(self.bus.close)
        await self.start_program(CONTROLDS[0])
        self.audit = Audit(self.bus, self.layout)
        self._open.append(self.audit.close)
        await self.audit.start()
        await asyncio.gather(*(self.start_program(host) for host in CONTROLDS[1:]))
        await self.client.apply_pool(LEDGER.name, pool_text(LEDGER))
        await asyncio.gather(*(self.start_program(host) for host in NODES))
        await self.whole()

    async def close(self) -> None:
        """End everything. Idempotent."""
        closing, self._open = self._open[::-1], []
        try:
            for close in closing:
                async with asyncio.timeout(_CLOSE_S):
                    await close()
        finally:
            for child in self.programs.values():
                child.kill_tree()
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.gather(*(child.wait() for child in self.programs.values()))

    async def start_program(self, host: str) -> None:
        """Start `host`'s program, or start it again, and wait until it says it is ready."""
        if (before := self.programs.get(host)) is not None:
            await before.wait()
        child = await Child.start(
            host, [*self.lan.inside(host), *self._command(host)], self.data / f"{host}.log"
        )
        self.programs[host] = child
        await child.wait_line(
            lambda line: line.startswith('{"ready"') or any(w in line for w in _SERVER_READY),
            _START_S,
        )

    def kill(self, *hosts: str) -> None:
        """kill -9 everything on these hosts at once."""
        for host in hosts:
            self.programs[host].kill_tree()

    def freeze(self, host: str, *, alone: bool = False) -> None:
        """SIGSTOP the host's program and, unless `alone`, all that it started."""
        for process in self._processes(host, alone):
            process.suspend()

    def thaw(self, host: str) -> None:
        for process in self._processes(host, False):
            process.resume()

    def pids(self) -> set[int]:
        """Return all processes of the plant."""
        tops = [child.pid for child in self.programs.values()]
        tops += [self.load.pid] if self.load.running else []
        return {*tops, *(process.pid for top in tops for process in descendants(top))}

    def workers(self, host: str) -> list[psutil.Process]:
        """Return the worker processes of a node."""
        return [
            process
            for process in descendants(self.programs[host].pid)
            if "agentd.worker" in " ".join(process.cmdline())
        ]

    async def stream_leader(self, stream: int) -> str:
        """Return the host of a stream's leader; '' while there is none."""
        found = await probes.stream(self.bus, self.layout.stream_name(stream))
        return found.cluster.leader if found is not None else ""

    async def etcd_leader(self) -> str:
        """Return the host of etcd's leader; '' while there is none that answers."""
        for host in ETCDS:
            status = await probes.etcd_status(self.lan.address(host))
            if status is not None and status.is_leader:
                return host
        return ""

    async def sessions_by_owner(self) -> dict[str, list[str]]:
        """Return the load's sessions by the controld that owns their shards."""
        owned: dict[str, list[str]] = {}
        for controld in await self.client.controlds():
            owned[controld.controld] = [
                name
                for name in self.load.sessions
                if shard_of(LEDGER.name, name, CLUSTER.shards) in controld.shards
            ]
        return owned

    async def busiest(self) -> str:
        """Return the node that runs the most tasks, once one runs any."""
        busiest = ""

        async def look() -> str:
            nonlocal busiest
            nodes = [node for node in await self.client.nodes() if node.node in NODES]
            found = max(nodes, key=lambda node: node.running)
            busiest = found.node
            return "" if found.running else "no node runs anything"

        await self._until(look, "a node runs something")
        return busiest

    def fill_disk(self, host: str) -> None:
        """Leave no byte free on the small disk of a running NATS server; blocks a moment."""
        root = Path(f"/proc/{self.programs[host].pid}/root")
        ballast = root / (self.data / host / "ballast").relative_to("/")
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    async def lead(self, stream: int, host: str) -> None:
        """Make `host` the leader of a stream, and return when it is."""
        body = json.dumps({"placement": {"preferred": host}}).encode()
        name = self.layout.stream_name(stream)

        async def ask() -> str:
            if await self.stream_leader(stream) == host:
                return ""
            await self.bus.call(f"$JS.API.STREAM.LEADER.STEPDOWN.{name}", body, _ASK_S)
            return f"{name} is not led by {host}"

        await self._until(ask, f"{host} leads {name}")

    async def clients_of(self, nats: str) -> list[str]:
        """Return the names of a NATS server's connections."""
        return await probes.connected(self.lan.address(nats))

    def stream_of(self, session: str) -> int:
        return self.layout.stream_of(shard_of(LEDGER.name, session, CLUSTER.shards))

    async def whole(self) -> None:
        """Return when leaders are elected, replicas current, shards owned, nodes ready."""
        await self._until(self._etcd_is_whole, "etcd is whole")
        await self._until(self._streams_are_whole, "all replicas are current")
        await self._until(self._shards_are_owned, "all shards and racks are owned")
        await self._until(self._nodes_are_ready, "all nodes are ready")

    async def shards_owned(self, without: str = "") -> None:
        """Return when every shard has an owner other than `without`."""
        await self._until(lambda: self._shards_are_owned(without), f"owners without {without}")

    async def settle(self) -> None:
        """End the load and check all that was promised against the streams.

        Raises AssertionError.
        """
        await self.load.drain(_WHOLE_S)
        assert self.load.wrong() == []
        promised = {promise.task for promise in self.load.promises.values()}
        await self._until(lambda: self._all_is_told(promised), "the streams hold every end")
        assert self.audit.wrong == []

    def log_tails(self) -> str:
        return "\n".join(f"--- {name}\n{child.tail(6)}" for name, child in self.programs.items())

    def _processes(self, host: str, alone: bool) -> list[psutil.Process]:
        if host == CLIENT:
            return [psutil.Process(self.load.pid)]
        top = psutil.Process(self.programs[host].pid)
        return [top] if alone else [top, *top.children(recursive=True)]

    async def _until(self, holds: Callable[[], Awaitable[str]], what: str) -> None:
        """Ask again and again, as servers tell nobody; `holds` returns what is missing."""
        missing = ""
        try:
            async with asyncio.timeout(_WHOLE_S):
                while True:
                    try:
                        missing = await holds()
                    except CorefleetError as error:
                        missing = repr(error)
                    if not missing:
                        return
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise AssertionError(
                f"{what}: not within {_WHOLE_S:g} s: {missing}\n{self.log_tails()}"
            ) from None

    async def _nats_has_leader(self) -> str:
        for host in NATS:
            if not await probes.meta_leader(self.lan.address(host)):
                return f"{host} knows no leader"
        return ""

    async def _etcd_is_whole(self) -> str:
        for host in ETCDS:
            if await probes.etcd_status(self.lan.address(host)) is None:
                return f"{host} does not answer"
        return "" if await self.etcd_leader() else "no leader"

    async def _streams_are_whole(self) -> str:
        for stream in range(CLUSTER.streams):
            name = self.layout.stream_name(stream)
            found = await probes.stream(self.bus, name)
            if found is None:
                return f"{name} does not answer"
            if lagging := found.cluster.lagging(CLUSTER.replicas):
                return f"{name}: {lagging}"
        return ""

    async def _shards_are_owned(self, without: str = "") -> str:
        controlds = [c for c in await self.client.controlds() if c.controld != without]
        owned = {shard for controld in controlds for shard in controld.shards}
        racks = {rack for controld in controlds for rack in controld.racks}
        if not without and len(controlds) < len(CONTROLDS):
            return f"only {[c.controld for c in controlds]} live"
        missing = set(range(CLUSTER.shards)) - owned
        if missing or not racks >= set(NODES.values()):
            return f"shards {missing}, racks {set(NODES.values()) - racks} have no owner"
        return ""

    async def _nodes_are_ready(self) -> str:
        states = {node.node: node.state for node in await self.client.nodes()}
        dead = {name: states.get(name, "unknown") for name in NODES if states.get(name) != "ready"}
        return f"{dead}" if dead else ""

    async def _all_is_told(self, promised: set[str]) -> str:
        if unended := self.audit.unended(promised):
            return f"no results of {unended}"
        live = await self.audit.live()
        return f"still live: {live}" if live else ""

    def _command(self, host: str) -> list[str]:
        if host in ETCDS:
            return self._etcd_command(host)
        if host in NATS:
            command = [str(find_nats_server()), "-c", str(self._nats_config(host))]
            return self._on_small_disk(host, command) if host in self.small_disks else command
        if host in CONTROLDS:
            program, config = "controld", self._controld_config(host)
        else:
            program, config = "agentd", self._node_config(host)
        return [sys.executable, "-m", program, "--config", str(config)]

    def _on_small_disk(self, host: str, command: list[str]) -> list[str]:
        script = f'mount -t tmpfs -o size={SMALL_DISK_BYTES} none "$0" && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, str(self.data / host), *command]

    def _etcd_command(self, host: str) -> list[str]:
        address = self.lan.address(host)
        client, peer = f"http://{address}:2379", f"http://{address}:2380"
        cluster = ",".join(f"{name}=http://{self.lan.address(name)}:2380" for name in ETCDS)
        return [
            *(str(find_etcd()), "--name", host, "--data-dir", str(self.data / host)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster),
        ]

    def _nats_config(self, host: str) -> Path:
        address = self.lan.address(host)
        routes = ", ".join(f'"nats://{self.lan.address(name)}:6222"' for name in NATS)
        return self._write(
            f"{host}.conf",
            f'server_name: {host}\nhost: {address}\nport: 4222\nhttp: "{address}:8222"\n'
            f"max_payload: 8MB\njetstream {{ store_dir: {json.dumps(str(self.data / host))} }}\n"
            f'cluster {{ name: plant, listen: "{address}:6222", routes: [{routes}] }}\n',
        )

    def _controld_config(self, host: str) -> Path:
        endpoints = [f"{self.lan.address(name)}:2379" for name in ETCDS]
        return self._write(
            f"{host}.toml",
            f'id = "{host}"\nlisten = "{self.lan.address(host)}:7070"\n'
            'insecure = "any-address"\n'
            f"nats.servers = {json.dumps(self.nats_urls)}\n"
            f"etcd.endpoints = {json.dumps(endpoints)}\n"
            f"cluster.shards = {CLUSTER.shards}\ncluster.streams = {CLUSTER.streams}\n"
            f"cluster.replicas = {CLUSTER.replicas}\n",
        )

    def _node_config(self, host: str) -> Path:
        cpus = sorted(os.sched_getaffinity(0))
        cpu = cpus[list(NODES).index(host) % len(cpus)]
        return self._write(
            f"{host}.toml",
            f'node_id = "{host}"\nrack = "{NODES[host]}"\ncpus = "{cpu}"\n'
            'insecure = "any-address"\n'
            f"data_dir = {json.dumps(str(self.data / host))}\n"
            f'probe_listen = "{self.lan.address(host)}:0"\n'
            f"nats.servers = {json.dumps(self.nats_urls)}\n",
        )

    def _write(self, name: str, text: str) -> Path:
        path = self.data / name
        path.write_text(text, encoding="utf-8")
        return path


@asynccontextmanager
async def running_plant(data: Path) -> AsyncIterator[Plant]:
    """Yield a plant under load; on leaving nothing of it is left, whatever happened."""
    with Lan() as lan:
        plant = Plant(data, lan)
        try:
            await plant.start()
            await plant.load.start()
            await plant.load.moving()
            yield plant
        finally:
            await plant.load.kill()
            await plant.close()
