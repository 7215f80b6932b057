"""What /proc/cpuinfo tells of architecture and instruction-set features. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

# https://gitlab.com/x86-psABIs/x86-64-ABI, "Micro-Architecture Levels", in the kernel's names.
_LEVELS = (
    ("x86-64-v1", "lm"),
    ("x86-64-v2", "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"),
    ("x86-64-v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"),
    ("x86-64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl"),
)
_X86_NAMES = {"pni": "sse3", "abm": "lzcnt"}
"""The kernel's name and everybody else's; both are kept."""
_FEATURES = re.compile(r"^(flags|Features|features|isa)[ \t]*:[ \t]*(.*)$", re.MULTILINE)
_NAMES = re.compile(
    r"^(model name|Model Name|vendor_id|cpu|isa|CPU implementer|CPU variant|CPU part|"
    r"CPU revision)[ \t]*:[ \t]*(.*)$",
    re.MULTILINE,
)
_PROCESSOR = re.compile(r"^processor[ \t]*:?[ \t]*(\d+)[ \t]*[:\n]", re.MULTILINE)
_ARM_PART = re.compile(
    r"^processor[ \t]*:[ \t]*(\d+)$|"
    r"^CPU (implementer|variant|part|revision)[ \t]*:[ \t]*(\w+)$",
    re.MULTILINE,
)
_RISCV = re.compile(r"(rv\d+)([a-z]*)((?:_\w+)*)\Z")
_POWER_LITTLE_ENDIAN_FROM = 8


@dataclass(slots=True, frozen=True)
class CpuInfo:
    """`cpus` are those listed; `names` hold the distinct values of each name."""

    arch: str = ""
    """Guessed from the text; '' if nothing tells."""
    features: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parts: dict[int, str] = field(default_factory=dict)
    """By ARM CPU: its MIDR, put together from the four fields."""


def read_cpuinfo(text: str, machine: str = "") -> CpuInfo:
    """Return what `text` says; `machine` is the architecture where the kernel named it."""
    # A thousand CPUs repeat some thirty lines: each is looked at once.
    brief = "\n".join(dict.fromkeys(text.splitlines()))
    found: dict[str, set[str]] = {}
    for key, value in _NAMES.findall(brief):
        found.setdefault(key, set()).add(value.strip())
    names = {key: tuple(sorted(values - {""})) for key, values in found.items()}
    lines = {(key, value.strip()) for key, value in _FEATURES.findall(brief)}
    x86 = any(key == "flags" for key, _ in lines)
    sets = [set(_split(key, value)) for key, value in lines]
    sets += [{"altivec"} & set(value.split()) for value in names.get("cpu", ())]
    common = set.intersection(*sets) if sets else set()
    arch = machine or _guess(brief, common, names, x86)
    return CpuInfo(
        arch=arch,
        features=normalise(arch, common),
        cpus=tuple(sorted({int(cpu) for cpu in _PROCESSOR.findall(brief + "\n")})),
        names=names,
        parts=_parts(text) if "CPU part" in names else {},
    )


def normalise(arch: str, features: Iterable[str]) -> tuple[str, ...]:
    """Return sorted lower-case names; x86 gains its levels and the usual names of two flags."""
    names = {name.lower() for name in features}
    if arch in {"x86_64", "i686", "i386"}:
        names.update(usual for kernel, usual in _X86_NAMES.items() if kernel in names)
    if arch == "x86_64":
        for level, needed in _LEVELS:
            if not names.issuperset(needed.split()):
                break
            names.add(level)
    return tuple(sorted(names))


def common_baseline(features_of_many: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return the features that every machine of a fleet has, sorted; none of no machines."""
    sets = [set(features) for features in features_of_many]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def _split(key: str, value: str) -> list[str]:
    if key == "isa":
        match = _RISCV.match(value)
        return [match[1], *match[2], *match[3].split("_")[1:]] if match else value.split()
    if "," in value:
        return [part.strip().replace(" ", "-") for part in value.split(",")]
    return value.split()


def _guess(text: str, features: set[str], names: dict[str, tuple[str, ...]], x86: bool) -> str:
    if x86:
        return "x86_64" if "lm" in features else "i686"
    if "CPU implementer" in names:
        return "aarch64" if "asimd" in features else "arm"
    power = re.search(r"^cpu\s*:\s*POWER(\d+)", text, re.MULTILINE)
    if power:
        # The text does not tell the byte order; distributions are little-endian since POWER8.
        return "ppc64le" if int(power[1]) >= _POWER_LITTLE_ENDIAN_FROM else "ppc64"
    isa = next(iter(names.get("isa", ())), "")
    if isa.startswith("rv"):
        return "riscv64" if isa.startswith("rv64") else "riscv32"
    for pattern, arch in (
        (r"^arch\s*:\s*IA-64", "ia64"),
        (r"^vendor_id\s*:\s*IBM/S390", "s390x"),
        (r"(?i)loongson|loongarch", "loongarch64"),
    ):
        if re.search(pattern, text, re.MULTILINE):
            return arch
    return ""


def _parts(text: str) -> dict[int, str]:
    """Return MIDRs by CPU.

    Arm ARM, MIDR_EL1: implementer 31:24, variant 23:20, architecture 19:16, part 15:4,
    revision 3:0.
    """
    fields: dict[int, dict[str, int]] = {}
    cpu = 0
    for processor, name, value in _ARM_PART.findall(text):
        if processor:
            cpu = int(processor)
        else:
            try:
                fields.setdefault(cpu, {})[name] = int(value, 0)
            except ValueError:
                continue
    return {
        cpu: f"0x{_midr(found):016x}"
        for cpu, found in fields.items()
        if {"implementer", "part"} <= found.keys()
    }


def _midr(found: dict[str, int]) -> int:
    return (
        found["implementer"] << 24
        | found.get("variant", 0) << 20
        | 0xF << 16
        | found["part"] << 4
        | found.get("revision", 0)
    )
