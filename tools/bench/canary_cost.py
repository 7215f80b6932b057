"""What the canary costs on this machine: CPU time of the real bandwidth program."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from agentd.bandwidth.pipe import Setup, domain_setups, line_of, read_line
from agentd.bandwidth.report import Report
from agentd.core.topology import Overrides
from agentd.hostfs import HostFs
from agentd.probes import discover

_WARM_REPORTS = 4


def canary_cost(seconds: float) -> dict[str, float | str]:
    """Run the program with its default settings for so long.

    Returns its source, and the CPU time of the whole program in percent of one core
    (`canary_cpu_percent`): sensing, pressure, steal and the walks.
    """
    domains = domain_setups(discover(HostFs(), Overrides()))
    setup = Setup(node="bench", domains=domains, sources=("canary", "pressure"))
    with subprocess.Popen(
        [sys.executable, "-m", "agentd.bandwidth"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as program:
        try:
            assert program.stdin is not None
            assert program.stdout is not None
            program.stdin.write(line_of(setup))
            program.stdin.flush()
            for _ in range(_WARM_REPORTS):
                report = read_line(program.stdout.readline(), Report)
            process = psutil.Process(program.pid)
            before, began = process.cpu_times(), time.monotonic()
            while time.monotonic() - began < seconds:
                report = read_line(program.stdout.readline(), Report)
            after, took_s = process.cpu_times(), time.monotonic() - began
        finally:
            program.kill()
    used_s = after.user + after.system - before.user - before.system
    return {"canary_source": report.source, "canary_cpu_percent": round(100 * used_s / took_s, 3)}
