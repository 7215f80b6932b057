"""The launchers' contract on a real systemd, with four NUMA nodes of one CPU."""

from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.guest.guest import BIN, Guest

_ROOT = Path(__file__).parents[2]
_AT = "/opt/tests"
_NEEDED = (
    "pyproject.toml",
    "tests/__init__.py",
    "tests/conftest.py",
    "tests/leaks.py",
    "tests/contract/__init__.py",
    "tests/contract/launcher_backends.py",
    "tests/contract/test_launcher.py",
    "tests/guest/__init__.py",
    "tests/guest/real_systemd.py",
    "tests/unit/__init__.py",
    "tests/unit/agentd/__init__.py",
    "tests/unit/agentd/launch/__init__.py",
    "tests/unit/agentd/launch/scripted_systemd.py",
)
_LIMIT_S = 540.0

pytestmark = pytest.mark.timeout(_LIMIT_S + 60, func_only=True)


def test_the_contract_of_launchers_holds_on_a_real_systemd(
    guest: Guest, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    for name in _NEEDED:
        copy = tmp_path / "tree" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(_ROOT / name, copy)
    guest.put_tree(tmp_path / "tree", _AT)
    ran = guest.run(
        f"cd {_AT} && {BIN}/python -m pytest -p no:cacheprovider -q -k systemd "
        "--junitxml=/tmp/contract.xml tests/contract/test_launcher.py tests/guest/real_systemd.py",
        _LIMIT_S,
    )
    assert ran.code in (0, 1), f"pytest in the guest ended with {ran.code}:\n{ran.out}{ran.err}"
    results = outcomes(guest.get("/tmp/contract.xml"))
    say(pytestconfig, [line for lines in results.values() for line in lines])
    assert results["passed"], "no test of the contract ran"
    failed = "\n".join(results["failed"])
    assert not failed, f"{failed}\n{ran.out}"
    # systemd is there: it is no reason to skip.
    assert not [line for line in results["skipped"] if "no systemd" in line]


def outcomes(junit: str) -> dict[str, list[str]]:
    """Return one line for each test in pytest's junit file, by how it ended."""
    found: dict[str, list[str]] = {"failed": [], "skipped": [], "passed": []}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        how, why = "passed", ""
        for kind, meaning in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
            for each in case.findall(kind):
                how, why = meaning, f": {each.get('message', '').partition(chr(10))[0]}"
        seconds = float(case.get("time", 0.0))
        found[how].append(f"{how:7} {seconds:6.1f} s  {case.get('name')}{why}")
    return found


def say(config: pytest.Config, lines: list[str]) -> None:
    """Show the results in the terminal, as they are no tests of this session."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    capture = config.pluginmanager.get_plugin("capturemanager")
    if reporter is not None and capture is not None:
        with capture.global_and_fixture_disabled():
            for line in lines:
                reporter.write_line(f"guest: {line}")
