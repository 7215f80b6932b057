"""How processes are started; where sockets lie; which models count."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import cast

import msgspec
import pytest

from agentd.core.node_io import Place
from agentd.core.plan import Plan, make_plan
from agentd.core.supervision import UnitKey
from agentd.core.topology import Overrides
from agentd.engines import EngineWatch
from agentd.household import PlannedHousehold, places_of
from agentd.links import WorkerLinks
from agentd.models import find_models
from agentd.rooms import make_rooms
from corefleet.config import AgentdConfig, EngineConfig
from corefleet.errors import ConfigError, LaunchFailed
from corefleet.messages.links import Welcome
from corefleet.messages.records import PoolSpec
from tests.unit.agentd.machines import found, two_sockets

POOL = PoolSpec(name="p", model="m", workers=2, spares=1)


class DirectModels:
    """Model files as they lie on the disk."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths
        self.engines = 0

    async def ensure(self, model: str, domain: int) -> Path:
        return self._paths[model]

    def note_engine(self, model: str, domain: int, *, started: bool) -> None:
        self.engines += 1 if started else -1


class Expected:
    """WorkerLinks as the household uses it."""

    path = Path("/run/w.sock")

    def __init__(self) -> None:
        self.welcomes: dict[str, Welcome] = {}

    def expect(self, worker: str, welcome: Welcome) -> None:
        self.welcomes[worker] = welcome


def household(tmp_path: Path) -> tuple[PlannedHousehold, Expected]:
    links = Expected()
    made = PlannedHousehold(
        "n1",
        make_rooms(str(tmp_path)),
        EngineConfig(),
        DirectModels({"m": tmp_path / "m.gguf"}),
        cast(WorkerLinks, links),
        cast(EngineWatch, None),
    )
    return made, links


def plan(tmp_path: Path, *pools: PoolSpec) -> Plan:
    topology = found(tmp_path / "machine", two_sockets(), Overrides(domains=(1,)))
    return make_plan(topology, pools, ["m"], {}, serves_models=True)


async def test_a_worker_names_its_domain_and_cpus_and_is_expected(tmp_path: Path) -> None:
    house, links = household(tmp_path)
    made = plan(tmp_path, POOL)
    wanted = house.take(made)
    key = UnitKey("worker", "p", 1)
    assert wanted[key][0] == 3
    spec = house.spec(key, "p-d1-1")
    assert spec.cpus == made.domains[1].worker_cpus
    assert spec.domain == 1
    line = " ".join(spec.command)
    assert "-m agentd.worker --socket /run/w.sock --worker p-d1-1 --domain 1 --cpus 4,12" in line
    welcome = links.welcomes["p-d1-1"]
    assert welcome.pool == POOL
    await house.prepare(UnitKey("engine", "m", 1))
    engine = house.spec(UnitKey("engine", "m", 1), "m-d1-2")
    assert (spec.kind, spec.pool, spec.service_class) == ("worker", "p", "online")
    assert (engine.kind, engine.unit, engine.service_class) == ("engine", "m", "engine")
    assert engine.cpu_weight > spec.cpu_weight
    assert welcome.engine_socket in engine.command


async def test_an_engine_gets_its_threads_and_sizes(tmp_path: Path) -> None:
    house, _ = household(tmp_path)
    made = plan(tmp_path, POOL)
    house.take(made)
    (unit,) = made.engines
    await house.prepare(UnitKey("engine", "m", 1))
    line = " ".join(house.spec(UnitKey("engine", "m", 1), "m-d1-1").command)
    assert f"--model {tmp_path / 'm.gguf'}" in line
    assert f"--cpus 5-7 --threads {unit.threads}" in line
    assert (unit.model, unit.domain, unit.cpus, unit.threads) == ("m", 1, (5, 6, 7), 3)


def test_only_what_workers_must_know_restarts_them(tmp_path: Path) -> None:
    house, _ = household(tmp_path)
    key = UnitKey("worker", "p", 1)
    before = house.take(plan(tmp_path, POOL))[key][1]
    wider = msgspec.structs.replace(POOL, slots=99, rate_per_s=5.0, workers=1)
    assert house.take(plan(tmp_path, wider))[key][1] == before
    other = msgspec.structs.replace(POOL, prompt="else")
    assert house.take(plan(tmp_path, other))[key][1] != before


def test_memory_limits_alone_restart_nothing(tmp_path: Path) -> None:
    house, _ = household(tmp_path)
    key = UnitKey("worker", "p", 1)
    before = house.take(plan(tmp_path, POOL))[key][1]
    narrow = plan(tmp_path, POOL, msgspec.structs.replace(POOL, name="q"))
    assert house.take(narrow)[key][1] == before


def test_a_unit_that_the_plan_lost_meanwhile_is_not_started(tmp_path: Path) -> None:
    house, _ = household(tmp_path)
    house.take(plan(tmp_path))
    with pytest.raises(LaunchFailed, match="the plan has changed"):
        house.spec(UnitKey("worker", "p", 1), "p-d1-1")


def test_places_are_those_of_the_plan(tmp_path: Path) -> None:
    (spec,) = places_of(plan(tmp_path, POOL)).items()
    assert spec[0] == Place("p", 1)
    assert (spec[1].slots, spec[1].workers, spec[1].model) == (8, 2, "m")


def test_sockets_lie_in_a_short_place(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80)
    rooms = make_rooms(str(deep))
    assert len(str(rooms.run)) < 70
    assert rooms.log == deep / "log"
    rooms.close()
    assert not rooms.run.exists()
    near = make_rooms(str(tmp_path / "x")) if len(str(tmp_path)) < 60 else None
    assert near is None or not near.borrowed


def test_a_data_directory_that_cannot_be_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="`data_dir`"):
        make_rooms(str(tmp_path / "file"))


def test_models_count_when_their_file_is_the_one_named(tmp_path: Path) -> None:
    (tmp_path / "good.gguf").write_bytes(b"GGUF")
    digest = hashlib.sha256(b"GGUF").hexdigest()
    text = "".join(
        f'[{name}]\nsize_bytes = 4\nsha256 = "{digest}"\nfile = "{name}.gguf"\n'
        f'[[{name}.sources]]\nkind = "path"\npath = "/nowhere"\n'
        for name in ("good", "gone")
    )
    (tmp_path / "models.toml").write_text(text)
    config = AgentdConfig(
        node_id="n1",
        data_dir=str(tmp_path),
        models=str(tmp_path / "models.toml"),
        model_dir=str(tmp_path),
    )
    models = find_models(config)
    assert models.paths == {"good": tmp_path / "good.gguf"}
    (warning,) = models.warnings
    assert warning.startswith("model gone is not usable")
    assert not find_models(msgspec.structs.replace(config, models="")).paths
