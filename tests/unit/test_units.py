"""What the project relies on in the units that run it, and what they must not ask for."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from agentd.core.health_samples import HealthSettings
from agentd.requirements import REQUIREMENTS
from agentd.settings import check_config as check_agentd
from controld.settings import check_config
from corefleet import config as configuration
from corefleet.config import AgentdConfig, ControldConfig

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "systemd"
BIN = "/opt/corefleet/current/bin/"
FILES = tuple(
    sorted(path.name for path in UNITS.iterdir() if path.suffix in (".service", ".slice"))
)
CONTROL = ("controld.service", "corefleet-etcd.service", "corefleet-nats.service")
SYSUSERS = UNITS / "corefleet.sysusers.conf"
SERVICES = tuple(name for name in FILES if name.endswith(".service"))
PROGRAMS = {"agentd", "controld", "etcd", "nats-server", "python"}
LONGEST_RUN_DIR_BYTES = 70
"""agentd.rooms puts its sockets elsewhere beyond that."""
SCORES = {
    "agentd.service": 30,
    "controld.service": 12,
    "corefleet-etcd.service": 13,
    "corefleet-heartbeat.service": 15,
    "corefleet-nats.service": 13,
}
"""The exposure that docs/node-operations.md and control-node.md explain, in tenths, rounded up."""

Options = dict[str, list[str]]


def read(name: str) -> Options:
    """Return a unit's options; one that is given again adds to its list."""
    options: Options = {}
    for line in (UNITS / name).read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            key, separator, value = line.partition("=")
            assert separator, line
            options.setdefault(key, []).append(value)
    return options


def only(options: Options, key: str) -> str:
    (value,) = options[key]
    return value


def production() -> AgentdConfig:
    return configuration.load(ROOT / "configs" / "agentd.production.toml", AgentdConfig)


def test_the_example_of_production_is_possible() -> None:
    check_agentd(production(), "agentd.production.toml")


@pytest.fixture
def agentd() -> Options:
    return read("agentd.service")


@pytest.fixture
def heartbeat() -> Options:
    return read("corefleet-heartbeat.service")


def test_there_are_the_units_that_nodes_and_control_nodes_need() -> None:
    node = {"agentd.service", "corefleet-heartbeat.service", "corefleet.slice"}
    assert set(FILES) == node | set(CONTROL)


@pytest.mark.parametrize("name", CONTROL)
def test_a_service_of_the_control_plane_has_a_user_of_its_own_and_no_rights(name: str) -> None:
    options = read(name)
    user = only(options, "User")
    assert re.search(rf"^u {user} +- ", SYSUSERS.read_text(), re.MULTILINE)
    assert only(options, "Group") == user
    assert only(options, "CapabilityBoundingSet") == ""
    for option in ("PrivateUsers", "ProtectKernelTunables", "ProtectClock", "RemoveIPC"):
        assert only(options, option) == "yes", option


def test_the_users_are_those_of_the_services() -> None:
    named = {line.split()[1] for line in SYSUSERS.read_text().splitlines() if line[:2] == "u "}
    assert named == {only(read(name), "User") for name in CONTROL}


def test_controld_is_the_installed_program_and_its_watchdog_is_fed() -> None:
    options = read("controld.service")
    assert only(options, "ExecStart") == (f"{BIN}controld --config /etc/corefleet/controld.toml")
    assert only(options, "Type") == "notify"
    assert float(only(options, "WatchdogSec")) >= 5


def test_the_example_of_a_control_node_is_right() -> None:
    path = ROOT / "configs" / "controld.production.toml"
    check_config(configuration.load(path, ControldConfig), str(path))


def test_nats_moves_its_leaders_before_it_ends_and_reads_its_users_anew() -> None:
    options = read("corefleet-nats.service")
    assert only(options, "KillSignal") == "SIGUSR2"
    assert only(options, "ExecReload") == "/bin/kill -HUP $MAINPID"


@pytest.mark.parametrize("name", FILES)
def test_an_option_is_given_twice_only_where_it_adds(name: str) -> None:
    repeated = {key for key, values in read(name).items() if len(values) > 1}
    assert repeated <= {"SystemCallFilter"}


def test_agentd_is_the_installed_program_with_the_configuration_that_is_here(
    agentd: Options,
) -> None:
    program, *arguments = only(agentd, "ExecStart").split()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert program.removeprefix(BIN) in scripts
    assert arguments == ["--config", "/etc/corefleet/agentd.toml"]


def test_the_heartbeat_program_exists_and_listens_where_agentd_looks(heartbeat: Options) -> None:
    program, flag, module, option, socket = only(heartbeat, "ExecStart").split()
    assert (program, flag, option) == (f"{BIN}python", "-m", "--socket")
    assert importlib.util.find_spec(f"{module}.__main__") is not None
    assert socket == production().heartbeat_socket
    assert Path(socket).parent == Path("/run") / only(heartbeat, "RuntimeDirectory")


def test_the_configuration_uses_the_directories_of_the_unit(agentd: Options) -> None:
    config = production()
    assert Path(config.run_dir) == Path("/run") / only(agentd, "RuntimeDirectory")
    assert Path(config.data_dir) == Path("/var/lib") / only(agentd, "StateDirectory")
    assert config.model_dir.startswith(f"{config.data_dir}/")
    assert len(config.run_dir.encode()) <= LONGEST_RUN_DIR_BYTES
    assert set(config.require) <= set(REQUIREMENTS)
    assert config.launcher == "systemd"


def test_sockets_survive_a_restart_of_agentd_and_the_two_share_no_directory(
    agentd: Options, heartbeat: Options
) -> None:
    assert only(agentd, "RuntimeDirectoryPreserve") == "yes"
    # systemd removes a unit's directory when the unit stops, with all that is in it.
    assert only(agentd, "RuntimeDirectory") != only(heartbeat, "RuntimeDirectory")
    # With it a DynamicUser's directory would lie where no one else may look.
    assert "RuntimeDirectoryPreserve" not in heartbeat


def test_the_watchdog_watches_agentd_alone(agentd: Options, heartbeat: Options) -> None:
    for options in (agentd, heartbeat):
        assert only(options, "Type") == "notify"
        assert only(options, "NotifyAccess") == "main"
    # Shorter than the time after which a node without beats is watched for jitter.
    assert 5 <= float(only(agentd, "WatchdogSec")) < HealthSettings().beats_window_s
    assert "WatchdogSec" not in heartbeat


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_always_comes_back(name: str) -> None:
    options = read(name)
    assert only(options, "Restart") == "always"
    assert only(options, "StartLimitIntervalSec") == "0"
    assert only(options, "RestartSec").endswith("ms")


def test_the_heartbeat_outlives_agentd(agentd: Options, heartbeat: Options) -> None:
    name = "corefleet-heartbeat.service"
    assert name in only(agentd, "Wants").split()
    assert name in only(agentd, "After").split()
    for binding in ("BindsTo", "PartOf", "Requires", "Requisite", "PropagatesStopTo"):
        assert binding not in agentd
        assert binding not in heartbeat


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_is_in_a_slice_that_agentd_limits(name: str) -> None:
    assert not only(read(name), "Slice").startswith("corefleet")


def test_the_kernel_kills_workers_before_agentd_and_the_heartbeat_last(
    agentd: Options, heartbeat: Options
) -> None:
    scores = [int(only(options, "OOMScoreAdjust")) for options in (heartbeat, agentd)]
    assert -1000 < scores[0] < scores[1] < 0


def test_agentd_ends_its_own_programs_and_nothing_of_it_stays(agentd: Options) -> None:
    assert only(agentd, "KillMode") == "mixed"


def test_agentd_has_the_capabilities_that_are_explained_and_no_more(agentd: Options) -> None:
    named = set(only(agentd, "CapabilityBoundingSet").split())
    assert named == {"CAP_SYS_PTRACE", "CAP_KILL", "CAP_PERFMON", "CAP_SYS_NICE"}
    text = (ROOT / "docs" / "node-operations.md").read_text()
    assert [name for name in sorted(named) if f"| {name} |" not in text] == []


def test_agentd_keeps_what_its_work_needs(agentd: Options) -> None:
    assert only(agentd, "ReadWritePaths") == "-/sys/fs/resctrl"
    assert only(agentd, "ProtectKernelTunables") == "yes"
    assert only(agentd, "ProtectProc") == "default"
    assert set(only(agentd, "RestrictAddressFamilies").split()) == {
        "AF_UNIX",
        "AF_INET",
        "AF_INET6",
    }
    # Refuses adjtimex, which the clock's health is read with.
    assert "ProtectClock" not in agentd
    # Hide other users' processes, or the network, or make root nobody.
    for option in ("PrivateNetwork", "PrivateUsers", "PrivatePIDs", "DynamicUser", "IPAddressDeny"):
        assert option not in agentd


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_gains_nothing_and_writes_nowhere_else(name: str) -> None:
    options = read(name)
    for option in (
        "NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectControlGroups",
        "ProtectKernelModules", "ProtectKernelLogs", "RestrictNamespaces", "RestrictRealtime",
        "RestrictSUIDSGID", "LockPersonality", "MemoryDenyWriteExecute",
    ):  # fmt: skip
        assert only(options, option) == "yes", option
    assert only(options, "ProtectSystem") == "strict"
    assert only(options, "AmbientCapabilities") == ""
    assert options["SystemCallFilter"][0] == "@system-service"
    # A call that is refused is an error to report, not a death.
    assert only(options, "SystemCallErrorNumber") == "EPERM"


def test_the_heartbeat_has_no_rights_but_a_socket_that_root_may_use(heartbeat: Options) -> None:
    assert only(heartbeat, "CapabilityBoundingSet") == ""
    assert only(heartbeat, "DynamicUser") == "yes"
    # agentd is root without CAP_DAC_OVERRIDE: modes count for it.
    assert only(heartbeat, "Group") == "root"
    assert int(only(heartbeat, "UMask"), 8) & 0o070 == 0
    assert int(only(heartbeat, "RuntimeDirectoryMode"), 8) & 0o050 == 0o050
    assert int(only(heartbeat, "RuntimeDirectoryMode"), 8) & 0o007 == 0


def test_the_slice_of_the_workers_sets_no_limit() -> None:
    options = read("corefleet.slice")
    assert set(options) <= {
        "Description", "CPUAccounting", "MemoryAccounting", "TasksAccounting", "IOAccounting",
    }  # fmt: skip


@pytest.fixture
def analyze() -> str:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("no systemd-analyze")
    return program


def allowed_calls(analyze: str, options: Options) -> set[str]:
    """Return the system calls that the filters of a unit let pass."""
    run = subprocess.run(
        [analyze, "--no-pager", "syscall-filter"], capture_output=True, text=True, check=True
    )
    groups: dict[str, list[str]] = {}
    for line in run.stdout.splitlines():
        word = line.split()[0] if line.split() else "#"
        if line.startswith("@"):
            members = groups.setdefault(word, [])
        elif groups and not word.startswith("#"):
            members.append(word)

    def calls(name: str) -> set[str]:
        if not name.startswith("@"):
            return {name}
        return set().union(*(calls(member) for member in groups[name]))

    allowed: set[str] = set()
    for line in options["SystemCallFilter"]:
        named = set().union(*(calls(word) for word in line.removeprefix("~").split()))
        allowed = allowed - named if line.startswith("~") else allowed | named
    return allowed


def test_the_filter_lets_pass_what_agentd_and_its_programs_call(
    agentd: Options, analyze: str
) -> None:
    allowed = allowed_calls(analyze, agentd)
    assert allowed >= {
        "perf_event_open", "adjtimex", "sched_setaffinity", "pidfd_open", "pidfd_send_signal",
        "getxattr", "prctl", "mkdir", "rmdir", "statfs",
        "capset",  # setpriv, which ties a program's life to agentd's
    }  # fmt: skip
    assert not allowed & {
        "mount", "bpf", "ptrace", "setuid", "chroot", "init_module", "clock_settime", "chown",
        "process_vm_writev", "kexec_load", "reboot", "swapon", "iopl", "pivot_root", "keyctl",
    }  # fmt: skip


def test_the_filter_of_the_heartbeat_is_narrower(
    agentd: Options, heartbeat: Options, analyze: str
) -> None:
    assert allowed_calls(analyze, heartbeat) < allowed_calls(analyze, agentd)


@pytest.mark.parametrize("name", SERVICES)
def test_the_exposure_is_what_the_documentation_explains(name: str, analyze: str) -> None:
    run = subprocess.run(
        [
            analyze, "--no-pager", "security", "--offline=true",
            f"--threshold={SCORES[name]}", str(UNITS / name),
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    if "unrecognized option" in run.stderr:
        pytest.skip("systemd-analyze is older than 250")
    assert run.returncode == 0, run.stdout + run.stderr


def test_systemd_understands_every_line(tmp_path: Path, analyze: str) -> None:
    etc = tmp_path / "etc/systemd/system"
    etc.mkdir(parents=True)
    for name in FILES:
        shutil.copy(UNITS / name, etc)
    named = {only(read(name), "ExecStart").split()[0] for name in SERVICES}
    assert {program.removeprefix(BIN) for program in named} == PROGRAMS
    for program in (*named, "/bin/kill"):
        path = tmp_path / program.removeprefix("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    run = subprocess.run(
        [
            analyze, "verify", "--man=no", "--recursive-errors=no", f"--root={tmp_path}",
            *(str(etc / name) for name in FILES),
        ],
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    # About units that are not in the little tree it says nothing of ours.
    wrong = [line for line in run.stderr.splitlines() if any(name in line for name in FILES)]
    assert wrong == []
