"""The code keeps to docs/architecture.md, "Layout and imports"; each rule is shown to fail."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit import architecture_rules as rules

ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (*rules.PACKAGES, "tests", "tools")

TreeRule = Callable[[str, ast.Module], Iterator[str]]
TREE_RULES: list[TreeRule] = [
    rules.purity,
    rules.kernel_files,
    rules.spelling,
    rules.environment,
    rules.adapters,
    rules.exports_only,
]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    """The text of every module of ours, by path."""
    found = {}
    for folder in _FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            path = file.relative_to(ROOT).as_posix()
            if not path.startswith(rules.GENERATED):
                found[path] = file.read_text(encoding="utf-8")
    assert "corefleet/ids.py" in found
    return found


@pytest.fixture(scope="module")
def trees(sources: dict[str, str]) -> dict[str, ast.Module]:
    return {path: ast.parse(source, path) for path, source in sources.items()}


def _broken(lines: Iterator[str]) -> str:
    return "\n".join(lines)


@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: TreeRule, trees: dict[str, ast.Module]) -> None:
    assert not _broken(line for path, tree in trees.items() for line in rule(path, tree))


def test_modules_and_functions_are_small(
    sources: dict[str, str], trees: dict[str, ast.Module]
) -> None:
    assert not _broken(
        line for path, source in sources.items() for line in rules.sizes(path, source, trees[path])
    )


def test_no_module_is_a_dumping_ground(sources: dict[str, str]) -> None:
    assert not _broken(line for path in sources for line in rules.names(path))


def test_modules_import_each_other_one_way_only(trees: dict[str, ast.Module]) -> None:
    assert rules.cycles(rules.module_graph(trees)) == []


def test_import_contracts_hold() -> None:
    run = _lint_imports(ROOT)

    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(
    ("rule", "path", "source", "breach"),
    [
        (rules.purity, "controld/core/shard.py", "import time", "imports time"),
        (rules.purity, "corefleet/bus.py", "from random import Random", "imports random"),
        (rules.purity, "agentd/engine/schedule.py", "def f():\n    import os", "imports os"),
        (
            rules.purity,
            "agentd/core/plan.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio",
            "imports asyncio",
        ),
        (rules.purity, "corefleet/messages/wire.py", "open('x')", "calls open()"),
        (rules.kernel_files, "agentd/probes/cpus.py", "p = '/sys/devices'", "hostfs"),
        (rules.kernel_files, "agentd/launch/plain.py", "p = f'/proc/{pid}/status'", "hostfs"),
        (rules.spelling, "controld/owner.py", "key = '/corefleet/nodes/' + node", "subjects.py"),
        (rules.spelling, "agentd/links.py", "s = f'cf.node.{node}.drop'", "subjects.py"),
        (rules.environment, "agentd/app.py", "import os\nx = os.environ['A']", "config.py"),
        (rules.environment, "agentctl/main.py", "import os\nx = os.getenv('A')", "config.py"),
        (rules.environment, "controld/api.py", "from os import environ", "config.py"),
        (
            rules.adapters,
            "controld/runner.py",
            "from corefleet.adapters.memory import MemoryBus",
            "only app modules",
        ),
        (rules.adapters, "agentd/links.py", "from corefleet import adapters", "only app modules"),
        (rules.exports_only, "agentd/__init__.py", "VERSION = 1", "exports only"),
        (rules.exports_only, "agentd/core/__init__.py", "def f(): pass", "exports only"),
    ],
)
def test_rule_finds_a_breach(rule: TreeRule, path: str, source: str, breach: str) -> None:
    lines = list(rule(path, ast.parse(source)))

    assert len(lines) >= 1
    assert path in lines[0]
    assert breach in lines[0]


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (rules.purity, "controld/runner.py", "import time"),
        (rules.purity, "controld/core/shard.py", "from corefleet.ids import TaskId"),
        (rules.kernel_files, "agentd/hostfs.py", "p = '/sys/devices'"),
        (rules.kernel_files, "agentd/probes/cpus.py", "'''Reads /sys/devices.'''"),
        (rules.spelling, "corefleet/subjects.py", "key = '/corefleet/nodes/'"),
        (rules.environment, "corefleet/config.py", "import os\nx = os.environ['A']"),
        (rules.adapters, "controld/app.py", "from corefleet.adapters import memory"),
        (rules.adapters, "agentd/worker/app.py", "import corefleet.adapters.memory"),
        (
            rules.exports_only,
            "corefleet/__init__.py",
            "'''Doc.'''\nfrom a import b\n__all__ = ['b']",
        ),
    ],
)
def test_rule_lets_pass(rule: TreeRule, path: str, source: str) -> None:
    assert list(rule(path, ast.parse(source))) == []


def test_long_modules_and_functions_are_found() -> None:
    function = "def long():\n" + "    x = 1\n" * 60
    module = "x = 1\n" * 501

    assert "long has 61 lines" in _broken(rules.sizes("a.py", function, ast.parse(function)))
    assert "501 lines" in _broken(rules.sizes("a.py", module, ast.parse(module)))


@pytest.mark.parametrize(
    "path",
    ["agentd/utils.py", "controld/core/shard_helpers.py", "tools/common/a.py", "agentd/misc.py"],
)
def test_dumping_grounds_are_found(path: str) -> None:
    assert list(rules.names(path))


def test_cycles_are_found() -> None:
    trees = {
        "p/a.py": ast.parse("def f():\n    from p import b"),
        "p/b.py": ast.parse("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.c"),
        "p/c.py": ast.parse("from .a import f"),
        "p/d.py": ast.parse("from p.a import f"),
    }

    assert rules.cycles(rules.module_graph(trees)) == [["p/a.py", "p/b.py", "p/c.py"]]


def test_import_contracts_can_fail(tmp_path: Path) -> None:
    for package, source in (("corefleet", "def f():\n    import agentd\n"), ("agentd", "")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(source)
    (tmp_path / "pyproject.toml").write_text(
        "[tool.importlinter]\nroot_packages = ['corefleet', 'agentd']\n"
        "[[tool.importlinter.contracts]]\nname = 'direction'\ntype = 'forbidden'\n"
        "source_modules = ['corefleet']\nforbidden_modules = ['agentd']\n"
    )

    run = _lint_imports(tmp_path)

    assert run.returncode == 1
    assert "corefleet is not allowed to import agentd" in run.stdout


def _lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    program = "; ".join(
        [
            "import sys",
            "sys.path.insert(0, '.')",
            "from importlinter.cli import lint_imports_command",
            "lint_imports_command(['--no-cache', '--no-logo'])",
        ]
    )
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
