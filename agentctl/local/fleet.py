"""A whole fleet on one machine: etcd, NATS, controlds and virtual nodes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agentctl.local.certificates import Certificates, Issuer, tls_lines
from agentctl.local.processes import Child, free_port
from corefleet.adapters.servers import find_etcd, find_nats_server
from corefleet.client import Client
from corefleet.config import cache_dir, pool_text
from corefleet.errors import InvalidInput
from corefleet.identity import Role
from corefleet.messages.records import PoolSpec
from corefleet.tls import TlsFiles

_RESTART_PAUSE_S = 1.0
_STARTS_AT_ONCE = 4

Report = Callable[[str], None]


@dataclass(slots=True, frozen=True, kw_only=True)
class FleetPlan:
    """What to start. Sizes are counts; `data` holds all files and logs."""

    data: Path
    nodes: int = 2
    controlds: int = 2
    port: int = 7070
    """First controld's gRPC port, the others follow; 0 takes free ones."""
    pools: tuple[PoolSpec, ...] = ()
    models: Path | None = None
    model_dir: Path | None = None
    shards: int = 16
    streams: int = 2
    log_level: str = "info"
    engine: dict[str, int] = field(default_factory=dict)
    controld: str = ""
    """More lines of each controld's TOML."""
    tls: Issuer | None = None
    """Who makes the certificates of all; None: everything is in plain text."""
    monitor_nats: bool = False
    """NATS serves its counters on `LocalFleet.nats_monitor`, on this machine only."""
    metrics: bool = False
    """Each program serves its metrics at an address in `LocalFleet.metrics`."""


class LocalFleet:
    """The running fleet; use as an async context manager."""

    def __init__(self, plan: FleetPlan, report: Report = lambda line: None) -> None:
        if plan.controlds < 1:
            raise InvalidInput("controlds", plan.controlds, "1 or more")
        if plan.nodes < 0:
            raise InvalidInput("nodes", plan.nodes, "0 or more")
        self.plan = plan
        self.addresses: list[str] = []
        self.servers: dict[str, Child] = {}
        self.controlds: dict[str, Child] = {}
        self.nodes: dict[str, Child] = {}
        self.nats_url = ""
        self.nats_monitor = ""
        self.metrics: dict[str, str] = {}
        """By controld and node: host:port."""
        self._ports: dict[str, int] = {}
        self.etcd_endpoint = ""
        self._etcd_command: list[str] = []
        self.certificates: Certificates | None = None
        if plan.tls is not None:
            self.certificates = Certificates(plan.data / "pki", plan.tls)
        self._report = report

    async def __aenter__(self) -> LocalFleet:
        try:
            await self._start()
        except BaseException:  # whatever stops the start, nothing may be left running
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def client(self) -> Client:
        """Return a client of all controlds of this fleet."""
        if self.certificates is None:
            return Client(self.addresses)
        return Client(self.addresses, tls=TlsFiles.of(self.certificates.files("operator", "local")))

    async def stop(self) -> None:
        """End everything that was started, nodes first."""
        await asyncio.gather(*(node.stop() for node in self.nodes.values()))
        await asyncio.gather(*(controld.stop() for controld in self.controlds.values()))
        await asyncio.gather(*(server.stop() for server in self.servers.values()))

    async def start_node(self, name: str) -> Child:
        """Start one virtual node and wait until it is ready."""
        config = self._node_config(name)
        return await self._start_daemon("agentd", name, config, self.nodes)

    async def start_controld(self, name: str, port: int = 0) -> Child:
        """Start one controld and wait until it serves; `port` 0 is the one it had before."""
        port = self._ports.setdefault(name, port)
        config = self._controld_config(name, port)
        return await self._start_daemon("controld", name, config, self.controlds)

    async def supervise(self) -> None:
        """Start again what ends by itself, as systemd does on a real node.

        Returns when etcd or NATS ends: without them there is no fleet.
        """
        while True:
            watched = {**self.servers, **self.controlds, **self.nodes}
            waiters = {asyncio.ensure_future(child.wait()): name for name, child in watched.items()}
            try:
                ended, _ = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiter in waiters:
                    waiter.cancel()
            name = waiters[ended.pop()]
            child = watched[name]
            self._report(f"{child.name} ended by itself; its log is {child.log}:\n{child.tail()}")
            if name in self.servers:
                return
            await asyncio.sleep(_RESTART_PAUSE_S)
            if name in self.nodes:
                await self.start_node(name)
            else:
                await self.start_controld(name)
            self._report(f"{child.name} is up again")

    @property
    def ports(self) -> dict[str, str]:
        """Addresses of the controlds that were started, by name."""
        return {name: f"127.0.0.1:{port}" for name, port in self._ports.items()}

    def kill_node(self, name: str) -> None:
        """kill -9 a virtual node: agentd, its workers and its engines at once."""
        self.nodes[name].kill_tree()

    def kill_controld(self, name: str) -> None:
        """kill -9 a controld."""
        self.controlds[name].kill_tree()

    async def restart_etcd(self) -> None:
        """Stop etcd politely and start it again on its port and data."""
        await self.servers["etcd"].stop()
        await self._run_etcd()

    def reload_nats(self) -> None:
        """Have the NATS server read its configuration and certificates again."""
        os.kill(self.servers["nats"].pid, signal.SIGHUP)

    async def restart_nats(self) -> None:
        """kill -9 the NATS server and start it again on its port and data."""
        nats = self.servers["nats"]
        nats.kill_tree()
        await nats.wait()
        await self._run_nats()

    async def _start(self) -> None:
        plan = self.plan
        plan.data.mkdir(parents=True, exist_ok=True)
        await asyncio.gather(self._start_etcd(), self._start_nats())
        self._report("etcd and NATS are up")
        ports = [plan.port + i if plan.port else free_port() for i in range(plan.controlds)]
        await self.start_controld("c1", ports[0])
        starts = asyncio.Semaphore(_STARTS_AT_ONCE)

        async def start(number: int, port: int) -> None:
            async with starts:
                await self.start_controld(f"c{number}", port)

        await asyncio.gather(*(start(i + 1, port) for i, port in enumerate(ports) if i))
        self._report(f"{plan.controlds} controlds are up: {', '.join(self.addresses)}")
        async with self.client() as client:
            for pool in plan.pools:
                await client.apply_pool(pool.name, pool_text(pool))
        await asyncio.gather(*(self.start_node(f"n{i + 1}") for i in range(plan.nodes)))
        if plan.nodes:
            self._report(f"{plan.nodes} virtual nodes are up: {', '.join(self.nodes)}")

    async def _start_etcd(self) -> None:
        client, peer = free_port(), free_port()
        self.etcd_endpoint = f"127.0.0.1:{client}"
        data = self.plan.data / "etcd"
        secure: list[str] = []
        scheme = "http"
        if self.certificates is not None:
            tls = self.certificates.files("etcd", "local")
            scheme = "https"
            secure = ["--client-cert-auth", "--trusted-ca-file", tls.ca]
            secure += ["--cert-file", tls.cert, "--key-file", tls.key]
        self._etcd_command = [
            str(find_etcd()), "--name", "local", "--data-dir", str(data),
            "--listen-client-urls", f"{scheme}://{self.etcd_endpoint}",
            "--advertise-client-urls", f"{scheme}://{self.etcd_endpoint}",
            "--listen-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}",
            "--initial-cluster", f"local=http://127.0.0.1:{peer}",
            "--force-new-cluster=" + ("true" if data.exists() else "false"),
            *secure,
        ]  # fmt: skip
        await self._run_etcd()

    async def _run_etcd(self) -> None:
        child = await Child.start("etcd", self._etcd_command, self._log("etcd"))
        self.servers["etcd"] = child
        await child.wait_line(lambda line: "ready to serve client requests" in line, 30)

    async def _start_nats(self) -> None:
        port = free_port()
        self.nats_url = f"nats://127.0.0.1:{port}"
        monitor = ""
        if self.plan.monitor_nats:
            address = f"127.0.0.1:{free_port()}"
            self.nats_monitor = f"http://{address}"
            monitor = f'http: "{address}"\n'
        if self.certificates is not None:
            tls = self.certificates.files("nats", "local")
            monitor += (
                f"tls {{ ca_file: {json.dumps(tls.ca)}, cert_file: {json.dumps(tls.cert)}, "
                f"key_file: {json.dumps(tls.key)}, verify: true }}\n"
            )
        self._config_file(
            "nats.conf",
            f"host: 127.0.0.1\nport: {port}\nmax_payload: 8MB\n{monitor}"
            f"jetstream {{ store_dir: {json.dumps(str(self.plan.data / 'nats'))} }}\n",
        )
        await self._run_nats()

    async def _run_nats(self) -> None:
        config = self.plan.data / "config" / "nats.conf"
        # Collecting garbage more rarely costs some memory and saves a tenth of the server's CPU.
        child = await Child.start(
            "nats",
            [str(find_nats_server()), "-c", str(config)],
            self._log("nats"),
            env={"GOGC": "400"},
        )
        self.servers["nats"] = child
        await child.wait_line(lambda line: "Server is ready" in line, 30)

    async def _start_daemon(
        self, program: str, name: str, config: Path, running: dict[str, Child]
    ) -> Child:
        child = await Child.start(
            f"{program} {name}",
            [sys.executable, "-m", program, "--config", str(config)],
            self._log(f"{program}-{name}"),
        )
        running[name] = child
        line = await child.wait_line(lambda text: text.startswith('{"ready"'), 90)
        if program == "controld":
            address = str(json.loads(line)["listen"])
            if address not in self.addresses:
                self.addresses.append(address)
        return child

    def _controld_config(self, name: str, port: int) -> Path:
        plan = self.plan
        return self._config_file(
            f"controld-{name}.toml",
            f'id = "{name}"\nlisten = "127.0.0.1:{port}"\n'
            f'nats.servers = ["{self.nats_url}"]\netcd.endpoints = ["{self.etcd_endpoint}"]\n'
            f'log.level = "{plan.log_level}"\n'
            f"cluster.shards = {plan.shards}\ncluster.streams = {plan.streams}\n"
            f"{self._metrics_line(name)}"
            f"{self._tls('controld', name, 'tls', 'nats.tls', 'etcd.tls')}{plan.controld}",
        )

    def _node_config(self, name: str) -> Path:
        plan = self.plan
        lines = [
            f'node_id = "{name}"',
            f'rack = "rack{(self._number(name) - 1) % 2 + 1}"',
            f"data_dir = {json.dumps(str(plan.data / name))}",
            f'cpus = "{self._cpus_of(self._number(name) - 1)}"',
            f'nats.servers = ["{self.nats_url}"]',
            f'log.level = "{plan.log_level}"',
            self._metrics_line(name),
        ]
        if plan.models is not None:
            lines.append(f"models = {json.dumps(str(plan.models.resolve()))}")
            lines.append(f"model_dir = {json.dumps(str(plan.model_dir or cache_dir() / 'models'))}")
        lines += [f"engine.{key} = {value}" for key, value in plan.engine.items()]
        text = "\n".join(lines) + "\n" + self._tls("agentd", name, "tls", "nats.tls")
        return self._config_file(f"agentd-{name}.toml", text)

    def _tls(self, role: Role, name: str, *keys: str) -> str:
        if self.certificates is None:
            return "insecure = true\n"
        files = self.certificates.files(role, name)
        return "".join(tls_lines(key, files) for key in keys)

    def _metrics_line(self, name: str) -> str:
        if not self.plan.metrics:
            return ""
        address = self.metrics.setdefault(name, f"127.0.0.1:{free_port()}")
        return f'metrics = "{address}"\n'

    def _cpus_of(self, index: int) -> str:
        """Deal this process's CPUs out to the virtual nodes; they share when there are too few."""
        cpus = sorted(os.sched_getaffinity(0))
        nodes = max(self.plan.nodes, index + 1)
        own = cpus[index::nodes] if nodes <= len(cpus) else [cpus[index % len(cpus)]]
        return ",".join(str(cpu) for cpu in own)

    def _number(self, name: str) -> int:
        return int(name.removeprefix("n"))

    def _config_file(self, name: str, text: str) -> Path:
        path = self.plan.data / "config" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def _log(self, name: str) -> Path:
        return self.plan.data / "log" / f"{name}.log"
