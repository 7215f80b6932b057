"""What systemd is told, by version. Types are checked against D-Bus's own marshalling."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dbus_fast import Message, Variant
from hypothesis import given
from hypothesis import strategies as st

from agentd.launch.properties import (
    PROPERTIES,
    UNLIMITED,
    Settings,
    dispensable,
    is_slice_name,
    is_unit_name,
    known_to,
    limit_properties,
    mask,
    parse_version,
    quota,
    slice_group,
    slice_name,
    slice_properties,
    unit_name,
    unit_properties,
)
from agentd.launch.protocol import LaunchSpec
from corefleet.errors import Incompatible, InvalidInput

SETTINGS = Settings(node="n1", cpus={0: (0, 1), 2: (8, 9)}, batch_cpus={2: 1.5})
BINDER = ("/usr/bin/numactl", "--physcpubind=8", "--membind=2")


def spec(**changes: object) -> LaunchSpec:
    values: dict[str, object] = {
        "name": "w1",
        "command": ("/opt/corefleet/bin/python", "-m", "agentd.worker"),
        "cpus": (8,),
        "domain": 2,
        "pool": "support",
        "unit": "support",
    }
    return LaunchSpec(**{**values, **changes})  # type: ignore[arg-type]


def told(given_spec: LaunchSpec, settings: Settings = SETTINGS) -> dict[str, Any]:
    return {item.name: item.value for item in unit_properties(settings, given_spec, BINDER)}


@given(st.sets(st.integers(0, 1023)))
def test_a_mask_has_bit_n_for_number_n(numbers: set[int]) -> None:
    data = mask(numbers)
    assert {n for n in range(len(data) * 8) if data[n // 8] >> (n % 8) & 1} == numbers
    assert not data or data[-1]


@pytest.mark.parametrize(
    ("text", "version"),
    [("252.39-1~deb12u1", 252), ("v249", 249), ("249.11-0ubuntu3", 249), ("257~rc1", 257)],
)
def test_versions_are_read(text: str, version: int) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("text", "says"), [("248.3", "248 is too old; expected 249"), ("", "names no version")]
)
def test_other_versions_are_refused(text: str, says: str) -> None:
    with pytest.raises(Incompatible, match=says):
        parse_version(text)


@pytest.mark.parametrize("kind", ["worker", "engine", "canary"])
@pytest.mark.parametrize("version", range(249, 258))
def test_every_property_is_in_the_table_and_marshals_as_its_type(version: int, kind: str) -> None:
    settings = Settings(
        node="n1",
        cpus={2: (8,)},
        batch_cpus={},
        writable=(Path("/var/lib/corefleet"),),
        models=Path("/run/corefleet/models"),
        environment={"A": "b"},
        working_directory=Path("/opt"),
        dynamic_user=True,
    )
    asked = unit_properties(settings, spec(kind=kind, memory_max=1 << 30), BINDER)
    kept, lost = known_to(version, asked)
    assert (len(kept), lost) == (len(asked), [])
    assert len({item.name for item in kept}) == len(kept)
    body = ["x.service", "fail", [[i.name, Variant(i.signature, i.value)] for i in kept], []]
    message = Message(
        destination="a.b", path="/", interface="a.b", member="C",
        signature="ssa(sv)a(sa(sv))", body=body,
    )  # fmt: skip
    assert message._marshall(False)


def test_what_a_version_does_not_know_is_left_out_and_said() -> None:
    asked = unit_properties(SETTINGS, spec(), BINDER)
    kept, lost = known_to(244, asked)
    names = {item.name for item in kept}
    assert {"ProtectClock", "ProtectProc", "PrivateIPC"}.isdisjoint(names)
    assert {"AllowedCPUs", "NUMAMask", "ProtectKernelLogs"} <= names
    assert sorted(line.rsplit(" ", 1)[1] for line in lost) == [
        "PrivateIPC", "ProtectClock", "ProtectProc",
    ]  # fmt: skip


def test_a_build_without_seccomp_loses_only_what_may_go() -> None:
    asked = unit_properties(SETTINGS, spec(), BINDER)
    kept, lost = known_to(252, asked, {"RestrictAddressFamilies"})
    assert len(kept) == len(asked) - 1
    assert lost == [
        "processes may use any socket family: systemd 252 does not know RestrictAddressFamilies"
    ]
    assert dispensable("RestrictAddressFamilies")
    assert not dispensable("AllowedCPUs")
    assert not dispensable("NoSuchProperty")


def test_binding_is_given_thrice() -> None:
    values = told(spec(cpus=(8, 9)))
    assert values["AllowedCPUs"] == b"\x00\x03"
    assert values["AllowedMemoryNodes"] == b"\x04"
    assert (values["NUMAPolicy"], values["NUMAMask"]) == (2, b"\x04")
    ((path, argv, ignores_failure),) = values["ExecStart"]
    assert path == "/usr/bin/numactl"
    assert argv == [*BINDER, "/opt/corefleet/bin/python", "-m", "agentd.worker"]
    assert ignores_failure is False


def test_without_numa_no_memory_is_bound() -> None:
    settings = Settings(node="n1", cpus={0: (0,)}, batch_cpus={}, numa=False)
    values = told(spec(domain=0), settings)
    assert {"AllowedMemoryNodes", "NUMAPolicy", "NUMAMask"}.isdisjoint(values)
    sliced = {item.name for item in slice_properties(settings, "engine", 0)}
    assert sliced == {"AllowedCPUs"}


def test_variables_in_a_command_are_not_expanded() -> None:
    ((_, argv, _),) = told(spec(command=("/bin/x", "$HOME", "$$")))["ExecStart"]
    assert argv[-2:] == ["$$HOME", "$$$$"]


def test_limits_are_set_only_if_asked_for() -> None:
    free = {item.name: item.value for item in limit_properties(SETTINGS, spec())}
    assert free["MemoryMax"] == free["MemoryHigh"] == free["TasksMax"] == UNLIMITED
    assert "MemorySwapMax" not in free
    bound = spec(memory_high=1 << 20, memory_max=1 << 21, tasks_max=9, cpu_weight=7)
    values = {item.name: item.value for item in limit_properties(SETTINGS, bound)}
    assert values["MemoryHigh"] == 1 << 20
    assert values["MemoryMax"] == 1 << 21
    assert (values["MemorySwapMax"], values["TasksMax"], values["CPUWeight"]) == (0, 9, 7)


def test_the_kernel_kills_batch_before_online_before_engines_before_agentd() -> None:
    scores = [told(spec(service_class=c))["OOMScoreAdjust"] for c in ("engine", "online", "batch")]
    assert 0 < scores[0] < scores[1] < scores[2]
    assert told(spec())["OOMPolicy"] == "continue"


def test_its_journal_entries_name_node_pool_domain_and_unit() -> None:
    values = told(spec(kind="engine", unit="m1", pool=""))
    assert values["LogExtraFields"] == [b"NODE=n1", b"DOMAIN=2", b"UNIT=m1"]
    assert values["SyslogIdentifier"] == "corefleet-engine"
    assert b"POOL=support" in told(spec())["LogExtraFields"]


def test_workers_and_engines_have_no_network_and_no_privileges() -> None:
    for kind in ("worker", "engine"):
        values = told(spec(kind=kind))
        assert values["PrivateNetwork"] is True
        assert values["RestrictAddressFamilies"] == [True, ["AF_UNIX"]]
        assert (values["NoNewPrivileges"], values["CapabilityBoundingSet"]) == (True, 0)
        assert "SystemCallFilter" not in values
    assert "PrivateNetwork" not in told(spec(kind="heartbeat"))


@pytest.mark.parametrize(
    ("changes", "home", "temporary"),
    [
        ({}, "yes", True),
        ({"command": ("/home/u/venv/bin/python", "-m", "x")}, "read-only", True),
        ({"environment": {"PYTHONPATH": "/opt/a:/root/b"}}, "read-only", True),
        ({"command": ("/opt/python", "--socket=/tmp/x/s")}, "yes", False),
        ({"command": ("/opt/python", "/homework", "/tmpfs")}, "yes", True),
    ],
)
def test_what_it_works_on_stays_visible(
    changes: dict[str, object], home: str, temporary: bool
) -> None:
    values = told(spec(**changes))
    assert values["ProtectHome"] == home
    assert ("PrivateTmp" in values) is temporary


def test_engines_only_read_the_replicas_and_workers_do_not_see_them() -> None:
    settings = Settings(node="n1", cpus={2: (8,)}, batch_cpus={}, models=Path("/run/c/models"))
    names = {"ReadOnlyPaths", "InaccessiblePaths"}
    for kind, name in (("engine", "ReadOnlyPaths"), ("worker", "InaccessiblePaths")):
        found = told(spec(kind=kind), settings)
        assert {key: found[key] for key in names & set(found)} == {name: ["-/run/c/models"]}
    hiding = replace(settings, hidden=(Path("/run/c/kept"),))
    for kind, seen in (("engine", []), ("worker", ["-/run/c/models"])):
        found = told(spec(kind=kind), hiding)
        assert found["InaccessiblePaths"] == ["-/run/c/kept", *seen]
    # The filler writes there.
    assert not names & set(told(spec(kind="filler"), settings))


def test_only_batch_slices_have_a_quota() -> None:
    values = {item.name: item.value for item in slice_properties(SETTINGS, "batch", 2)}
    assert values == {
        "AllowedCPUs": b"\x00\x03",
        "AllowedMemoryNodes": b"\x04",
        "CPUQuotaPerSecUSec": 1_500_000,
    }
    assert "CPUQuotaPerSecUSec" not in {i.name for i in slice_properties(SETTINGS, "online", 2)}
    free = {item.name: item.value for item in slice_properties(SETTINGS, "batch", 0)}
    assert free["CPUQuotaPerSecUSec"] == UNLIMITED
    with pytest.raises(InvalidInput, match=r"domain: 1 .*for slices: 0,2"):
        slice_properties(SETTINGS, "online", 1)


@pytest.mark.parametrize("cpus", [0.0, -1.0, float("nan")])
def test_a_quota_of_nothing_is_refused(cpus: float) -> None:
    with pytest.raises(InvalidInput, match="more than 0"):
        quota(cpus)


def test_a_slice_lies_where_its_dashes_say() -> None:
    assert slice_name("corefleet", "engine", 0) == "corefleet-engine-d0.slice"
    assert slice_group("corefleet", "engine", 0) == (
        "corefleet.slice/corefleet-engine.slice/corefleet-engine-d0.slice"
    )
    assert is_slice_name("corefleet", "corefleet-engine-d0.slice")
    assert not is_slice_name("corefleet", "corefleet-models.slice")
    assert not is_slice_name("corefleet", "corefleet-engine.slice")


@given(unit=st.text(min_size=1), random=st.binary(min_size=6, max_size=6))
def test_a_unit_name_is_valid_whatever_it_is_of(unit: str, random: bytes) -> None:
    name = unit_name("corefleet", spec(unit=unit), random.hex())
    assert name.startswith("corefleet-w-")
    assert name.endswith(f"-d2-{random.hex()}.service")
    assert len(name) < 256
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789:-_.\\")
    assert set(name) <= allowed
    assert is_unit_name("corefleet", name)


def test_other_programs_units_are_not_ours() -> None:
    assert not is_unit_name("corefleet", "corefleet-heartbeat.service")
    assert not is_unit_name("corefleet", "corefleet-etcd.service")
    assert (
        unit_name("corefleet", spec(kind="engine", unit="m"), "00") == "corefleet-e-m-d2-00.service"
    )


def test_what_may_be_lost_says_what_is_lost() -> None:
    essential = {"AllowedCPUs", "AllowedMemoryNodes", "NUMAPolicy", "MemoryMax", "ExecStart"}
    assert not any(PROPERTIES[name].without for name in essential)
