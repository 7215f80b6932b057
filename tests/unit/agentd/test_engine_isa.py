"""A build of llama.cpp that this CPU cannot run is refused, and never tried by an engine."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agentd.core.engine_isa import lacking, refusal_by_names, variants_of
from agentd.core.isa import normalise, read_cpuinfo
from agentd.core.topology import Topology
from agentd.engine_isa import CACHE_FILE, engine_libraries, engine_refusal
from agentd.hostfs import HostFs

HASWELL = ("sse4_2", "avx", "avx2", "f16c", "fma", "bmi1", "bmi2")
KUNPENG_920 = ("asimd", "asimddp", "asimdhp", "fphp")
X86_BUILD = ("alderlake", "haswell", "icelake", "sse42", "x64")


def machine(arch: str = "x86_64", features: tuple[str, ...] = HASWELL) -> Topology:
    return Topology(
        domains={},
        siblings={},
        possible=(),
        online=(),
        arch=arch,
        features=features,
        numa=True,
        warnings=(),
    )


def build(directory: Path, *variants: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name in ("libggml-base.so", "libggml.so", "libllama.so", "libggml-base.so.0"):
        (directory / name).write_bytes(b"no library")
    for variant in variants:
        (directory / f"libggml-cpu{variant and '-'}{variant}.so").write_bytes(b"no library")
    return directory


class Child:
    """A probe's command that runs `code` and counts how often it ran."""

    def __init__(self, log: Path, code: str) -> None:
        self._log = log
        told = f"with open({str(log)!r}, 'a') as log: print(os.getpid(), file=log)"
        source = f"import os, signal, sys, time\n{told}\n{code}"
        self.command = (sys.executable, "-c", source)

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self._log.read_text().split()] if self._log.exists() else []


DIES = "os.kill(os.getpid(), signal.SIGILL)"


def test_variants_are_read_from_file_names() -> None:
    files = ("libggml-cpu-armv8.2_1.so", "libggml-cpu.so", "libggml-base.so", "libllama.so")
    assert variants_of(files) == ("", "armv8.2_1")


@pytest.mark.parametrize(
    ("variant", "arch", "features", "lacks"),
    [
        ("x64", "x86_64", (), ()),
        ("haswell", "x86_64", HASWELL, ()),
        ("alderlake", "x86_64", HASWELL, ("avx_vnni",)),
        ("x64", "aarch64", KUNPENG_920, ("x86_64",)),
        ("armv8.0_1", "aarch64", (), ()),
        ("armv8.2_2", "aarch64", KUNPENG_920, ()),
        ("armv8.2_3", "aarch64", KUNPENG_920, ("sve",)),
        ("native", "x86_64", HASWELL, None),
    ],
)
def test_a_variant_lacks_what_the_cpu_does_not_name(
    variant: str, arch: str, features: tuple[str, ...], lacks: tuple[str, ...] | None
) -> None:
    assert lacking(variant, arch, features) == lacks


def test_a_cpuinfo_with_all_of_a_server_runs_all_its_generations() -> None:
    flags = (
        "flags : lm pni ssse3 sse4_1 sse4_2 popcnt cx16 lahf_lm avx avx2 f16c fma bmi1 bmi2 abm "
        "movbe xsave avx512f avx512cd avx512vl avx512dq avx512bw avx512vbmi avx512_vnni "
        "avx512_bf16 avx_vnni amx_tile amx_int8\n"
    )
    info = read_cpuinfo("processor : 0\n" + flags)
    for variant in ("sapphirerapids", "zen4", "icelake", "cooperlake", "alderlake", "ivybridge"):
        assert lacking(variant, info.arch, info.features) == ()


def test_one_variant_that_runs_is_enough() -> None:
    assert refusal_by_names(X86_BUILD, "x86_64", normalise("x86_64", HASWELL)) is None


def test_a_refusal_names_the_nearest_variant_and_what_the_cpu_lacks() -> None:
    refusal = refusal_by_names(("haswell", "icelake"), "x86_64", ("sse4_2", "avx", "f16c"))
    assert refusal is not None
    assert "made for haswell, icelake, and even haswell needs fma avx2 bmi2" in refusal
    assert "GGML_CPU_ALL_VARIANTS=ON" in refusal


def test_names_that_tell_nothing_refuse_nothing() -> None:
    assert refusal_by_names(("haswell", "future"), "x86_64", ("avx",)) is None
    assert refusal_by_names(("", "haswell"), "x86_64", ("avx",)) is None
    assert refusal_by_names(("haswell",), "x86_64", ()) is None
    assert refusal_by_names((), "x86_64", HASWELL) is None


async def test_a_build_for_other_cpus_is_refused_without_a_trial(tmp_path: Path) -> None:
    child = Child(tmp_path / "ran", "")
    refusal = await engine_refusal(
        machine(), build(tmp_path / "lib", "icelake"), tmp_path, probe=child.command
    )
    assert refusal is not None
    assert "even icelake needs avx512f" in refusal
    assert child.pids == []


async def test_a_trial_that_dies_of_sigill_is_a_refusal_and_is_kept(tmp_path: Path) -> None:
    child = Child(tmp_path / "ran", DIES)
    lib = build(tmp_path / "lib", "")
    for _ in range(2):
        refusal = await engine_refusal(machine(), lib, tmp_path, probe=child.command)
        assert refusal is not None
        assert "died of SIGILL" in refusal
    assert len(child.pids) == 1


async def test_another_build_or_cpu_is_tried_anew(tmp_path: Path) -> None:
    child = Child(tmp_path / "ran", "")
    lib = build(tmp_path / "lib", "")
    other = replace(machine(), features=("sse4_2",))
    for topology in (machine(), other, other):
        assert await engine_refusal(topology, lib, tmp_path, probe=child.command) is None
    (lib / "libggml-cpu.so").write_bytes(b"another library")
    assert await engine_refusal(other, lib, tmp_path, probe=child.command) is None
    assert len(child.pids) == 3


async def test_a_kept_answer_that_is_nonsense_is_asked_for_again(tmp_path: Path) -> None:
    child = Child(tmp_path / "ran", "")
    (tmp_path / CACHE_FILE).write_text("{")
    lib = build(tmp_path / "lib", "")
    assert await engine_refusal(machine(), lib, tmp_path, probe=child.command) is None
    assert await engine_refusal(machine(), lib, tmp_path, probe=child.command) is None
    assert len(child.pids) == 1


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('libgomp.so.1: not found', file=sys.stderr); sys.exit(10)", "libgomp.so.1"),
        ("sys.exit(11)", "no variant that llama.cpp would use"),
    ],
)
async def test_a_build_that_does_not_load_is_refused(tmp_path: Path, code: str, words: str) -> None:
    child = Child(tmp_path / "ran", code)
    refusal = await engine_refusal(
        machine(), build(tmp_path / "lib", ""), tmp_path, probe=child.command
    )
    assert refusal is not None
    assert words in refusal


@pytest.mark.parametrize("code", ["sys.exit(12)", "os.kill(os.getpid(), signal.SIGSEGV)"])
async def test_a_trial_that_tells_nothing_refuses_nothing_and_is_not_kept(
    tmp_path: Path, code: str
) -> None:
    child = Child(tmp_path / "ran", code)
    lib = build(tmp_path / "lib", "")
    for _ in range(2):
        assert await engine_refusal(machine(), lib, tmp_path, probe=child.command) is None
    assert len(child.pids) == 2


async def test_a_trial_that_hangs_is_ended_and_refuses_nothing(tmp_path: Path) -> None:
    child = Child(tmp_path / "ran", "time.sleep(60)")
    lib = build(tmp_path / "lib", "")
    refusal = await engine_refusal(machine(), lib, tmp_path, probe=child.command, timeout_s=1.0)
    assert refusal is None
    assert not any(psutil.pid_exists(pid) for pid in child.pids)


async def test_a_missing_installation_is_said(tmp_path: Path) -> None:
    assert "not installed" in (await engine_refusal(machine(), None, tmp_path) or "")
    refusal = await engine_refusal(machine(), tmp_path / "none", tmp_path)
    assert refusal is not None
    assert "has no libraries" in refusal


def this_machine() -> Topology:
    info = read_cpuinfo(HostFs().read("proc/cpuinfo") or "", os.uname().machine)
    return machine(info.arch, info.features)


async def test_the_installed_build_runs_on_this_machine(tmp_path: Path) -> None:
    lib = engine_libraries()
    assert lib is not None
    assert await engine_refusal(this_machine(), lib, tmp_path) is None
    assert (tmp_path / CACHE_FILE).exists(), "the trial told something"


async def test_llama_cpp_itself_turns_down_a_build_for_another_cpu(tmp_path: Path) -> None:
    lib, here = engine_libraries(), this_machine()
    assert lib is not None
    foreign = next(
        (v for v in variants_of(os.listdir(lib)) if lacking(v, here.arch, here.features)), None
    )
    if foreign is None:
        pytest.skip("this CPU runs every variant")
    alone = tmp_path / "lib"
    alone.mkdir()
    for path in lib.glob("lib*.so*"):
        if "-cpu-" not in path.name:
            (alone / path.name).symlink_to(path)
    # Under a name that says nothing, so that only a trial can tell.
    (alone / "libggml-cpu-unheard.so").symlink_to(lib / f"libggml-cpu-{foreign}.so")
    refusal = await engine_refusal(here, alone, tmp_path)
    assert refusal is not None
    assert "no variant that llama.cpp would use" in refusal


async def test_a_cancelled_trial_leaves_no_child(tmp_path: Path) -> None:
    started = tmp_path / "started"
    os.mkfifo(started)
    child = Child(started, "time.sleep(60)")
    lib = build(tmp_path / "lib", "")
    trial = asyncio.create_task(engine_refusal(machine(), lib, tmp_path, probe=child.command))
    pid = int(await asyncio.to_thread(started.read_text))
    trial.cancel()
    await asyncio.gather(trial, return_exceptions=True)
    assert not psutil.pid_exists(pid)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the illegal instruction is x86's")
async def test_a_library_with_an_illegal_instruction_is_refused(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    lib = build(tmp_path / "lib", "")
    source = tmp_path / "illegal.c"
    source.write_text('__attribute__((constructor)) void f(void) { __asm__("ud2"); }\n')
    target = lib / "libggml-base.so"
    await asyncio.to_thread(
        subprocess.run,
        [compiler, "-shared", "-fPIC", "-o", str(target), str(source)],
        check=True,
        timeout=30,
    )
    refusal = await engine_refusal(machine(), lib, tmp_path)
    assert refusal is not None
    assert "died of SIGILL" in refusal
