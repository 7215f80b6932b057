"""Reading health signals from the kernel's files, again and again."""

from __future__ import annotations

import asyncio
from pathlib import Path

from agentd.core.health_samples import (
    ClockState,
    DiskState,
    HealthVerdict,
    MemoryErrors,
    Throttled,
)
from agentd.health import HealthWatch, disk_state, kernel_clock, memory_errors, throttle_counts
from agentd.hostfs import HostFs
from corefleet.background import Background
from corefleet.clock import ManualClock

STEADY = ClockState(synchronised=True, error_s=0.001)


def tree(root: Path, files: dict[str, str]) -> HostFs:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostFs(root)


def never(error: BaseException) -> None:
    raise AssertionError(f"the watch failed: {error}")


class Told:
    """Verdicts as they come."""

    def __init__(self) -> None:
        self.verdicts: asyncio.Queue[HealthVerdict] = asyncio.Queue()

    async def until(self, unwell: int) -> HealthVerdict:
        while True:
            verdict = await asyncio.wait_for(self.verdicts.get(), 5)
            if len(verdict.unwell) == unwell:
                return verdict


def watch_of(host: HostFs, told: Told, paths: dict[str, Path] | None = None) -> HealthWatch:
    return HealthWatch(
        host,
        paths or {},
        ManualClock(),
        Background(never),
        told.verdicts.put_nowait,
        beats=lambda: (0, 0.2),
        every_s=0.005,
        read_clock=lambda: STEADY,
    )


def test_memory_errors_are_read_per_controller(tmp_path: Path) -> None:
    mc = "sys/devices/system/edac/mc"
    host = tree(
        tmp_path,
        {
            f"{mc}/mc0/ce_count": "3\n",
            f"{mc}/mc0/ue_count": "0\n",
            f"{mc}/mc10/ce_count": "7\n",
            f"{mc}/mc10/ue_count": "\n",
            f"{mc}/mc2/ce_count": "nonsense\n",
            f"{mc}/power/ce_count": "9\n",
        },
    )
    assert memory_errors(host) == [MemoryErrors("mc0", 3, 0), MemoryErrors("mc10", 7, None)]


def test_throttling_is_read_per_package(tmp_path: Path) -> None:
    files = {}
    for cpu, package, core in ((0, 0, 1), (1, 0, 2), (2, 1, 4)):
        base = f"sys/devices/system/cpu/cpu{cpu}"
        files[f"{base}/topology/physical_package_id"] = f"{package}\n"
        files[f"{base}/thermal_throttle/core_throttle_count"] = f"{core}\n"
        files[f"{base}/thermal_throttle/package_throttle_count"] = f"{core * 10}\n"
    files["sys/devices/system/cpu/cpufreq/thermal_throttle/core_throttle_count"] = "5\n"
    assert throttle_counts(tree(tmp_path, files)) == [
        Throttled("0", {"cpu0/core": 1, "cpu0/package": 10, "cpu1/core": 2, "cpu1/package": 20}),
        Throttled("1", {"cpu2/core": 4, "cpu2/package": 40}),
    ]


def test_a_machine_without_counters_has_none(tmp_path: Path) -> None:
    assert memory_errors(HostFs(tmp_path)) == []
    assert throttle_counts(HostFs(tmp_path)) == []


def test_this_kernels_clock_answers() -> None:
    state = kernel_clock()
    assert state is None or state.error_s >= 0


def test_a_real_directory_has_a_share_in_use_and_a_missing_one_an_error(tmp_path: Path) -> None:
    state = disk_state("data_dir", tmp_path)
    assert 0 <= state.used <= 1
    assert not state.read_only
    assert not state.error
    gone = disk_state("data_dir", tmp_path / "gone")
    assert gone == DiskState("data_dir", f"{tmp_path}/gone", error="No such file or directory")


async def test_changes_are_told_and_repetitions_are_not(tmp_path: Path) -> None:
    errors = "sys/devices/system/edac/mc/mc0/ue_count"
    host, told = tree(tmp_path, {errors: "0\n"}), Told()
    watch = watch_of(host, told)
    watch.start()
    try:
        assert (await told.until(unwell=0)).phase == "ok"
        (tmp_path / errors).write_text("1\n")
        verdict = await told.until(unwell=1)
        assert verdict.should_drain
        assert watch.latest == verdict
        assert await watch.look() == verdict
        assert told.verdicts.empty()
    finally:
        await watch.close()
    await watch.close()


async def test_what_the_machine_does_not_tell_is_named(tmp_path: Path) -> None:
    verdict = await HealthWatch(
        HostFs(tmp_path), {}, ManualClock(), Background(never), lambda _: None
    ).look()
    assert [line.partition(":")[0] for line in verdict.not_judged] == [
        "memory errors",
        "heat",
        "clock",
        "heartbeats",
    ]
    assert verdict.unwell == ()


async def test_a_data_directory_that_vanishes_is_unwell(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    told = Told()
    watch = watch_of(HostFs(tmp_path), told, {"data_dir": data})
    watch.start()
    try:
        await told.until(unwell=0)
        data.rmdir()
        verdict = await told.until(unwell=1)
        assert "cannot be asked" in verdict.unwell[0]
    finally:
        await watch.close()
