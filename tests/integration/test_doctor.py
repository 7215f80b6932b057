"""`agentctl doctor` against real servers: what is well, and what is wrong and what to do."""

from __future__ import annotations

import asyncio
import json
import sys
import tarfile
from pathlib import Path

from corefleet.client import Client
from tests.integration.control_plane import ControlPlane
from tests.integration.fake_node import FakeNode


async def doctor(*words: str) -> tuple[int | None, dict[str, dict[str, str]]]:
    """Return the exit code and the findings by check."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentctl", "doctor", *words, "--json"),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    findings = [json.loads(line) for line in out.decode().splitlines()]
    return process.returncode, {each["check"]: each for each in findings}


def addressed(addresses: list[str]) -> list[str]:
    return [word for address in addresses for word in ("--address", address)]


async def test_a_client_is_told_how_its_fleet_is(plane: ControlPlane, client: Client) -> None:
    async with FakeNode(plane.nats.url, "n1"):
        code, found = await doctor("client", *addressed(plane.addresses))
    assert [found[f"controld {address}"]["level"] for address in plane.addresses] == ["ok", "ok"]
    assert {name: found[name]["level"] for name in ("controlds", "shards", "pool p", "clock")} == {
        "controlds": "ok",
        "shards": "ok",
        "pool p": "ok",
        "clock": "ok",
    }
    assert code == 0


async def test_a_controld_that_does_not_answer_is_named(
    plane: ControlPlane, client: Client, free_port: object
) -> None:
    nobody = f"127.0.0.1:{free_port()}"  # type: ignore[operator]
    code, found = await doctor("client", *addressed([nobody]))
    assert code == 1
    assert found[f"controld {nobody}"]["level"] == "error"
    assert "journalctl" in found[f"controld {nobody}"]["do"]


async def test_a_control_node_looks_at_etcd_and_nats(
    plane: ControlPlane, tmp_path: Path, free_port: object
) -> None:
    endpoint, url = plane.etcd.endpoint, plane.nats.url
    away = f"127.0.0.1:{free_port()}"  # type: ignore[operator]
    config = tmp_path / "controld.toml"
    config.write_text(
        f'id = "c9"\netcd.endpoints = ["{endpoint}", "{away}", "{url.rpartition("/")[2]}"]\n'
        f'nats.servers = ["{url}", "nats://{endpoint}"]\n'
    )
    code, found = await doctor("control", "--config", str(config))
    assert code == 1
    assert found["configuration"]["level"] == "ok"
    assert found[f"etcd {endpoint}"]["level"] in ("ok", "warning")
    assert "version 3." in found[f"etcd {endpoint}"]["what"]
    assert found[f"etcd {away}"]["level"] == "error"
    assert "no etcd member" in found[f"etcd {url.rpartition('/')[2]}"]["what"]
    assert found[f"nats {url}"]["level"] == "ok"
    assert found[f"nats nats://{endpoint}"]["level"] == "error"


async def test_a_configuration_that_is_wrong_is_the_finding(tmp_path: Path) -> None:
    config = tmp_path / "agentd.toml"
    config.write_text('node_id = "n1"\ndata_dri = "/tmp"\n')
    code, found = await doctor("node", "--config", str(config))
    assert code == 1
    assert "data_dri" in found["configuration"]["what"]
    assert found["topology"]["level"] in ("ok", "warning")


async def test_a_support_bundle_has_the_fleet_in_it(
    plane: ControlPlane, client: Client, tmp_path: Path
) -> None:
    path = tmp_path / "bundle.tar.gz"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "agentctl", "support-bundle", "-o", str(path)),
        *("--config-dir", str(tmp_path), *addressed(plane.addresses)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    assert out.decode().strip() == str(path)
    assert "missing: config/agentd.toml" in err.decode()
    with tarfile.open(path) as archive:
        names = archive.getnames()
        pools = archive.extractfile("bundle/fleet/pools.json")
        assert pools is not None
        assert json.loads(pools.read())["name"] == "p"
    assert {"bundle/machine.json", "bundle/fleet/controlds.json", "bundle/version.txt"} <= set(
        names
    )
