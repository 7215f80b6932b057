"""The wheel is built once, verified, cached whole or not at all."""

from __future__ import annotations

import io
import re
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import wheelhouse
from tools.wheelhouse import BuildFailed, Recipe

ROOT = Path(__file__).resolve().parents[3]
RECIPE = Recipe(version="0.0.1", python_tag="cp311", machine="test")

BUILDS = """
import os, sys
print("Collecting llama-cpp-python")
print("[1/2] /usr/bin/g++ -DX=1 -o a.o -c /build/ggml.cpp")
print("  with", os.environ["CMAKE_ARGS"][:20])
sys.stdout.flush()
with open(sys.argv[1] + "/../../counted", "a") as counted:
    counted.write("x")
open(sys.argv[1] + "/llama_cpp_python-0.0.1-py3-none-any.whl", "w").close()
"""
FAILS = """
print("[7/9] Building CXX object x.cpp.o")
print("error: no such header")
raise SystemExit(3)
"""


def program(source: str) -> Callable[[Path], list[str]]:
    return lambda into: [sys.executable, "-c", source, str(into)]


def accept(wheel: Path) -> None:
    assert wheel.exists()


def test_it_is_built_once_and_found_again(tmp_path: Path) -> None:
    said = io.StringIO()

    first = wheelhouse.ensure(RECIPE, tmp_path, said, command=program(BUILDS), verify=accept)
    again = wheelhouse.ensure(RECIPE, tmp_path, said, command=program(FAILS), verify=accept)

    assert first == again == wheelhouse.find(RECIPE, tmp_path)
    assert [wheel.name for wheel in first.iterdir()] == ["llama_cpp_python-0.0.1-py3-none-any.whl"]
    assert "building llama-cpp-python 0.0.1" in said.getvalue()
    assert "with -DGGML_NATIVE=OFF" in (tmp_path / f"{RECIPE.key}.log").read_text()


def test_another_recipe_is_another_wheel(tmp_path: Path) -> None:
    wheelhouse.ensure(RECIPE, tmp_path, io.StringIO(), command=program(BUILDS), verify=accept)

    for other in (
        Recipe(version="0.0.2", python_tag="cp311", machine="test"),
        Recipe(version="0.0.1", python_tag="cp312", machine="test"),
        Recipe(version="0.0.1", python_tag="cp311", machine="aarch64"),
        Recipe(version="0.0.1", python_tag="cp311", machine="test", cmake_args=("-DX=1",)),
    ):
        assert wheelhouse.find(other, tmp_path) is None


def test_a_failed_build_shows_its_end_and_leaves_the_log_only(tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match=r"status 3;(?s:.*)error: no such header(?s:.*)see .*log"):
        wheelhouse.ensure(RECIPE, tmp_path, io.StringIO(), command=program(FAILS), verify=accept)

    assert wheelhouse.find(RECIPE, tmp_path) is None
    assert {e.name for e in tmp_path.iterdir()} == {f"{RECIPE.key}.log", f".{RECIPE.key}.lock"}


def test_a_wheel_that_does_not_load_is_not_kept(tmp_path: Path) -> None:
    empty = """
import sys, zipfile
with zipfile.ZipFile(sys.argv[1] + "/llama_cpp_python-0.0.1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("llama_cpp/lib/libllama.so", b"not a library")
"""

    with pytest.raises(BuildFailed, match=r"does not load \(status 1\)"):
        wheelhouse.ensure(RECIPE, tmp_path, io.StringIO(), command=program(empty))

    assert wheelhouse.find(RECIPE, tmp_path) is None


def test_what_a_killed_build_left_is_swept_away(tmp_path: Path) -> None:
    stale = tmp_path / f".{RECIPE.key}.build-abc"
    (stale / "wheel").mkdir(parents=True)

    wheelhouse.ensure(RECIPE, tmp_path, io.StringIO(), command=program(BUILDS), verify=accept)

    assert not stale.exists()


def test_a_long_build_shows_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheelhouse, "_BEAT_S", 0.05)
    said = _Lines()
    waits = (
        "import sys, os, time\n"
        "print('[1/2] /usr/bin/g++ -DX=1 -o a.o -c /build/ggml.cpp', flush=True)\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n" + BUILDS
    )
    said.when(r"\d+m\d\ds  \[1/2\] ggml.cpp\n?$", lambda: (tmp_path / "go").touch())

    wheelhouse.ensure(RECIPE, tmp_path, said, command=program(waits), verify=accept)

    assert "built in 0m" in said.getvalue()


def test_two_at_a_time_build_once(tmp_path: Path) -> None:
    said = _Lines()
    gate = (
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)\n"
        + BUILDS
    )
    said.when("waiting for another build", lambda: (tmp_path / "go").touch())
    found: list[Path] = []

    def ensure() -> None:
        found.append(
            wheelhouse.ensure(RECIPE, tmp_path, said, command=program(gate), verify=accept)
        )

    threads = [threading.Thread(target=ensure) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [tmp_path / RECIPE.key] * 2
    assert (tmp_path / "counted").read_text() == "x"


def test_pip_is_asked_for_a_wheel_from_source_and_nothing_else(tmp_path: Path) -> None:
    command = Recipe().command(tmp_path)

    assert command[1:4] == ["-m", "pip", "wheel"]
    assert {"--no-deps", "--no-cache-dir"} < set(command)
    assert command[-1] == f"llama-cpp-python=={wheelhouse.VERSION}"


def test_the_version_is_the_one_that_is_installed() -> None:
    pinned = (ROOT / "constraints.txt").read_text()

    assert f"\nllama_cpp_python=={wheelhouse.VERSION}\n" in pinned


def test_the_cached_wheel_loads() -> None:
    """`make setup` put it there; verifying is what a build ends with."""
    directory = wheelhouse.find(Recipe(), wheelhouse.wheels_dir())
    assert directory is not None, "run `make setup`"
    (wheel,) = directory.glob("*.whl")

    wheelhouse.verify_wheel(wheel)

    with zipfile.ZipFile(wheel) as archive:
        variants = [n for n in archive.namelist() if re.search(r"libggml-cpu-\w+\.so$", n)]
    assert len(variants) > 5


class _Lines(io.StringIO):
    """A stream that acts once a line matches."""

    def when(self, pattern: str, act: Callable[[], None]) -> None:
        self._pattern, self._act = re.compile(pattern), act

    def write(self, text: str) -> int:
        if self._pattern.search(text):
            self._act()
        return super().write(text)
