"""CPU time from /proc/stat, of the machine, of CPUs and of nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# https://docs.kernel.org/filesystems/proc.html, "Miscellaneous kernel statistics".
_COLUMNS = (
    "user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice",
)  # fmt: skip
_MS_PER_TICK = 10
"""USER_HZ is 100 wherever Linux runs."""

ALL_CPUS = -1


def parse_stat(text: str) -> dict[int, dict[str, int]]:
    """Return milliseconds by CPU and column; ALL_CPUS is the kernel's own sum.

    `user` and `nice` contain `guest` and `guest_nice`.
    """
    found = {}
    for line in text.splitlines():
        name, *values = line.split()[: len(_COLUMNS) + 1] or [""]
        number = name.removeprefix("cpu")
        if number == name or not all(value.isdecimal() for value in values):
            continue
        if number and not number.isdecimal():
            continue
        times = dict.fromkeys(_COLUMNS, 0)
        times.update(
            (column, int(value) * _MS_PER_TICK)
            for column, value in zip(_COLUMNS, values, strict=False)
        )
        found[int(number) if number else ALL_CPUS] = times
    return found


def sum_times(times: Mapping[int, Mapping[str, int]], cpus: Iterable[int]) -> dict[str, int]:
    """Return the sum over `cpus`, of those that have times."""
    total = dict.fromkeys(_COLUMNS, 0)
    for cpu in cpus:
        for column, value in times.get(cpu, {}).items():
            total[column] += value
    return total
