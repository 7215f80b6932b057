"""What a build of llama.cpp asks of a CPU, by the names of its libraries. Pure.

A build for many CPUs has one `libggml-cpu-<variant>.so` for each generation and takes the
best that runs. Source: ggml/src/CMakeLists.txt, ggml_add_cpu_backend_variant, and the score
functions beside it, ggml/src/ggml-cpu/arch/*/cpu-feats.cpp; features in the kernel's names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

_X86 = "x86_64"
_ARM = "aarch64"

_HASWELL = "sse4_2 avx f16c fma avx2 bmi2"
_SKYLAKEX = f"{_HASWELL} avx512f avx512cd avx512vl avx512dq avx512bw"
_ZEN4 = f"{_SKYLAKEX} avx512vbmi avx512_vnni avx512_bf16"
_HALF = "asimddp fphp asimdhp"
_MATRIX = f"{_HALF} sve i8mm"

_NEEDS: Mapping[str, tuple[str, str]] = {
    "x64": (_X86, ""),
    "sse42": (_X86, "sse4_2"),
    "sandybridge": (_X86, "sse4_2 avx"),
    "ivybridge": (_X86, "sse4_2 avx f16c"),
    "piledriver": (_X86, "sse4_2 avx f16c fma"),
    "haswell": (_X86, _HASWELL),
    "alderlake": (_X86, f"{_HASWELL} avx_vnni"),
    "skylakex": (_X86, _SKYLAKEX),
    "cannonlake": (_X86, f"{_SKYLAKEX} avx512vbmi"),
    "cascadelake": (_X86, f"{_SKYLAKEX} avx512_vnni"),
    "icelake": (_X86, f"{_SKYLAKEX} avx512vbmi avx512_vnni"),
    "cooperlake": (_X86, f"{_SKYLAKEX} avx512_vnni avx512_bf16"),
    "zen4": (_X86, _ZEN4),
    "sapphirerapids": (_X86, f"{_ZEN4} amx_tile amx_int8"),
    "armv8.0_1": (_ARM, ""),
    "armv8.2_1": (_ARM, "asimddp"),
    "armv8.2_2": (_ARM, _HALF),
    "armv8.2_3": (_ARM, f"{_HALF} sve"),
    "armv8.6_1": (_ARM, _MATRIX),
    "armv8.6_2": (_ARM, f"{_MATRIX} sve2"),
    "armv9.2_1": (_ARM, f"{_MATRIX} sme"),
    "armv9.2_2": (_ARM, f"{_MATRIX} sve2 sme"),
}
_PREFIX, _SUFFIX = "libggml-cpu", ".so"


def variants_of(files: Iterable[str]) -> tuple[str, ...]:
    """Return the variants among file names, sorted; '' is a `libggml-cpu.so` without a name."""
    return tuple(
        sorted(
            name.removeprefix(_PREFIX).removesuffix(_SUFFIX).removeprefix("-")
            for name in files
            if name.startswith((f"{_PREFIX}-", f"{_PREFIX}.")) and name.endswith(_SUFFIX)
        )
    )


def lacking(variant: str, arch: str, features: Collection[str]) -> tuple[str, ...] | None:
    """Return what a CPU lacks for `variant`, () if nothing; None: the variant is not known."""
    if variant not in _NEEDS:
        return None
    needed_arch, needs = _NEEDS[variant]
    if arch != needed_arch:
        return (needed_arch,)
    return tuple(name for name in needs.split() if name not in features)


def refusal_by_names(variants: Collection[str], arch: str, features: Collection[str]) -> str | None:
    """Return why no variant runs on this CPU; None if one does, or if names do not tell."""
    if not variants or not arch or not features:
        return None
    missing = {variant: lacking(variant, arch, features) for variant in variants}
    if any(not names for names in missing.values()):
        return None
    nearest = min(missing, key=lambda variant: (len(missing[variant] or ()), variant))
    return (
        f"the engine's build runs on none of this machine's CPUs: it is made for "
        f"{', '.join(sorted(variants))}, and even {nearest} needs "
        f"{' '.join(missing[nearest] or ())}, which this {arch} CPU lacks; "
        "install a build of llama-cpp-python with GGML_CPU_ALL_VARIANTS=ON"
    )
