"""Tries a build of llama.cpp on this CPU: `python -m agentd.engine_probe LIB_DIR`.

Loads its libraries as an engine does and multiplies small matrices with the variant that
llama.cpp chose, without a model. A build with instructions that the CPU lacks dies of SIGILL
here, and not in an engine. Functions and structures: ggml.h, ggml-backend.h, ggml-alloc.h.
"""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXIT_UNLOADABLE = 10
EXIT_NO_VARIANT = 11
EXIT_OTHER_INTERFACE = 12

_CPU_DEVICE = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
_WEIGHT_TYPES = (0, 1, 8, 12)  # GGML_TYPE_F32, _F16, _Q8_0, _Q4_K
_F32 = 0
_COLUMNS, _ROWS = 256, 16
_CONTEXT_BYTES = 1 << 20


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


def main() -> int:
    """Return 0 if the build works here, or one of the codes above."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its end is the answer, not a crash
    folder = Path(sys.argv[1])
    try:
        base = _load(folder, "libggml-base.so")
        ggml = _load(folder, "libggml.so")
        _load(folder, "libllama.so")
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201 - agentd reads the last line
        return EXIT_UNLOADABLE
    try:
        return _multiply(base, ggml, folder)
    except AttributeError as error:
        print(error, file=sys.stderr)  # noqa: T201 - agentd reads the last line
        return EXIT_OTHER_INTERFACE


def _load(folder: Path, name: str) -> ctypes.CDLL:
    return ctypes.CDLL(f"{folder / name}", mode=ctypes.RTLD_GLOBAL)


def _multiply(base: ctypes.CDLL, ggml: ctypes.CDLL, folder: Path) -> int:
    pointer, integer, length = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    load = _function(ggml, "ggml_backend_load_all_from_path", None, ctypes.c_char_p)
    load(str(folder).encode())
    by_type = _function(ggml, "ggml_backend_init_by_type", pointer, integer, ctypes.c_char_p)
    backend = by_type(_CPU_DEVICE, None)
    if not backend:
        return EXIT_NO_VARIANT
    init = _function(base, "ggml_init", pointer, _InitParams)
    new = _function(base, "ggml_new_tensor_2d", pointer, pointer, integer, length, length)
    multiply = _function(base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
    expand = _function(base, "ggml_build_forward_expand", None, pointer, pointer)
    allocate = _function(base, "ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer)
    clear = _function(base, "ggml_backend_buffer_clear", None, pointer, ctypes.c_uint8)
    compute = _function(base, "ggml_backend_graph_compute", integer, pointer, pointer)
    context = init(_InitParams(_CONTEXT_BYTES, None, True))
    graph = _function(base, "ggml_new_graph", pointer, pointer)(context)
    for kind in _WEIGHT_TYPES:
        weights = new(context, kind, _COLUMNS, _ROWS)
        expand(graph, multiply(context, weights, new(context, _F32, _COLUMNS, _ROWS)))
    clear(allocate(context, backend), 0)
    return 0 if compute(backend, graph) == 0 else EXIT_OTHER_INTERFACE


def _function(library: ctypes.CDLL, name: str, returns: Any, *takes: Any) -> Callable[..., Any]:
    """Return a function of the library; raises AttributeError if it has none of that name."""
    found = getattr(library, name)
    found.restype, found.argtypes = returns, takes
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
