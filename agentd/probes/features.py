"""Architecture and instruction-set features, as /proc/cpuinfo names them."""

from __future__ import annotations

from agentd.core.topology import Facts
from agentd.hostfs import HostFs

# https://gitlab.com/x86-psABIs/x86-64-ABI, "Micro-Architecture Levels", in the kernel's names.
_LEVELS = (
    ("x86-64-v2", "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"),
    ("x86-64-v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"),
    ("x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl"),
)


def probe(host: HostFs, facts: Facts) -> None:
    """Fill `arch` and `features`: those that every listed CPU has, and x86-64's level."""
    text = host.read("proc/cpuinfo") or ""
    common: set[str] | None = None
    x86 = False
    for line in text.splitlines():
        name, _, value = line.partition(":")
        key = name.strip()
        if key in {"flags", "Features"}:
            x86 = key == "flags"
            found = set(value.split())
            common = found if common is None else common & found
    features = common or set()
    facts.arch = host.machine or _guess(features, x86)
    if facts.arch == "x86_64":
        for level, needed in _LEVELS:
            if not features.issuperset(needed.split()):
                break
            features.add(level)
    facts.features = tuple(sorted(features))


def _guess(features: set[str], x86: bool) -> str:
    if not features:
        return ""
    if x86:
        return "x86_64" if "lm" in features else "i686"
    return "aarch64" if "asimd" in features else "arm"
