"""What is installed in a guest: all dependencies on a disk, and the project itself.

Made by the host's pip for the image's Python, whichever Python runs here.
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools import wheelhouse
from tools.guest.cache import LOG, key_of, made_once
from tools.guest.host import run
from tools.guest.image import PYTHON, make_ext4

ROOT = Path(__file__).resolve().parents[2]
TEST_REQUIREMENTS = ("pytest", "pytest-asyncio", "pytest-timeout", "hypothesis", "psutil")
"""So that tests of the project can be run in the guest."""
OWN = ("corefleet", "controld", "agentd", "agentctl")
"""The packages of the project's own wheel."""
DISK = "payload.ext4"
"""The file system of /opt/corefleet: a virtual environment `<version>/` and `wheels/`."""

_EXTRAS = ("journald", "systemd")
_DISK_SIZE = "2G"
_NEWEST_GLIBC = 36
"""2.36 is the image's; 2.17 is the oldest that wheels are made for."""
_OLDEST_GLIBC = 17
_PIP_LIMIT_S = 600.0
_STEP_LIMIT_S = 180.0


def project_requirements(root: Path = ROOT) -> list[str]:
    """Return what pyproject.toml asks for, with the extras of a node and of tests."""
    project = _project(root)
    optional = project.get("optional-dependencies", {})
    wanted = [*project["dependencies"], *TEST_REQUIREMENTS]
    for extra in _EXTRAS:
        wanted += optional.get(extra, [])
    return sorted(set(wanted))


def version(root: Path = ROOT) -> str:
    """Return the project's version."""
    return str(_project(root)["version"])


def commands(root: Path = ROOT) -> dict[str, str]:
    """Return the project's commands: name to `module:function`."""
    return dict(_project(root)["scripts"])


def ensure_payload(machine: str = "x86_64", root: Path = ROOT) -> Path:
    """Return the directory of the cache that holds the payload disk.

    Kept by what is asked for and constraints.txt. Without llama-cpp-python where the host's
    wheel of it does not fit. Raises GuestError.
    """
    requirements = project_requirements(root)
    recipe = replace(wheelhouse.Recipe(), machine=machine)
    llama: Path | None = None
    if recipe == wheelhouse.Recipe():
        llama = wheelhouse.ensure(recipe, wheelhouse.wheels_dir(), sys.stderr)
    else:
        requirements = [each for each in requirements if not each.startswith("llama-cpp-python")]
    constraints = root / "constraints.txt"
    key = key_of(
        machine,
        version(root),
        *requirements,
        constraints.read_bytes(),
        recipe.key,
        Path(__file__).read_bytes(),
    )

    def make(scratch: Path) -> None:
        log = scratch / LOG
        disk = scratch / "disk"
        wheels = disk / "wheels"
        options: list[str | Path] = ["--constraint", constraints, *requirements]
        if llama is not None:
            options += ["--find-links", llama]
        run([*pip("download", machine), "--dest", wheels, *options], log, _PIP_LIMIT_S)
        lay_out([*wheels.glob("*.whl")], _environment(disk, version(root)), log, machine)
        make_ext4(disk, scratch / DISK, _DISK_SIZE, log)
        shutil.rmtree(disk)

    return made_once(f"payload-{key}", make)


def source_key(root: Path = ROOT) -> str:
    """Return a digest of everything that goes into the project's wheel."""
    parts: list[bytes | str] = []
    for file in _sources(root):
        parts += [file.relative_to(root).as_posix(), file.read_bytes()]
    return key_of(*parts)


def lay_out_project(site: Path, log: Path, machine: str = "x86_64", root: Path = ROOT) -> None:
    """Install the checkout into the directory `site`; the checkout stays as it is."""
    scratch = site.with_name(f"{site.name}.build")
    copy = scratch / "source"
    for file in _sources(root):
        target = copy / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--quiet"),
            *("--no-deps", "--no-build-isolation", "--wheel-dir", scratch, copy),
        ],
        log,
        _STEP_LIMIT_S,
    )
    lay_out([*scratch.glob("*.whl")], site, log, machine)
    shutil.rmtree(scratch)


def lay_out(wheels: Sequence[Path], site: Path, log: Path, machine: str) -> None:
    """Install wheels into a directory that can be imported from, compiled if we can."""
    command = [*pip("install", machine), "--no-deps", "--no-compile", "--target", site]
    run([*command, "--no-index", *wheels], log, _PIP_LIMIT_S)
    shutil.rmtree(site / "bin", ignore_errors=True)  # names the host's Python
    if f"{sys.version_info.major}.{sys.version_info.minor}" == PYTHON:
        # unchecked-hash: copying must not make them stale. -f: pip may have left some.
        compiled = ["compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash"]
        run([sys.executable, "-m", *compiled, "-s", site, site], log, _STEP_LIMIT_S)


def _environment(disk: Path, version: str) -> Path:
    """Make a virtual environment of the image's Python and return its site-packages."""
    home = disk / version
    site = home / "lib" / f"python{PYTHON}" / "site-packages"
    site.mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin/python3").symlink_to("/usr/bin/python3")
    (home / "bin/python").symlink_to("python3")
    (home / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {PYTHON}\n"
    )
    (disk / "current").symlink_to(version)
    return site


def pip(verb: str, machine: str) -> list[str | Path]:
    """Return the start of a pip command line that takes what fits the image."""
    minors = range(_NEWEST_GLIBC, _OLDEST_GLIBC - 1, -1)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in minors]
    platforms += [f"manylinux2014_{machine}", f"linux_{machine}"]
    return [
        *(sys.executable, "-m", "pip", verb, "--disable-pip-version-check", "--quiet"),
        *("--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON),
        *(f"--platform={platform}" for platform in platforms),
    ]


def _project(root: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return project


def _sources(root: Path) -> list[Path]:
    files = [root / name for name in ("pyproject.toml", "README.md", "LICENSE")]
    for package in OWN:
        files += [
            path
            for path in sorted((root / package).rglob("*"))
            if path.is_file() and "__pycache__" not in path.parts
        ]
    return files
