"""The rules of docs/architecture.md, "Layout and imports", as functions of source text.

Each takes a path relative to the repository and the parsed module, and returns one
line for each breach. test_architecture.py applies them and shows that each can fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath

MODULE_LINES = 500
FUNCTION_LINES = 60

PROGRAMS = ("agentctl", "agentd", "controld")
PACKAGES = ("corefleet", *PROGRAMS)
GENERATED = "corefleet/rpc/"

_LEAVES = frozenset(
    f"corefleet/{name}.py" for name in ("bus", "codec", "errors", "ids", "store", "subjects")
)
_PURE = frozenset(
    {
        "agentd/engine/schedule.py",
        "corefleet/pki/inventory.py",
        "corefleet/pki/rotation.py",
        "corefleet/pki/wants.py",
    }
)
_IMPURE = frozenset(
    {
        "asyncio", "concurrent", "datetime", "grpc", "logging", "multiprocessing", "nats", "os",
        "psutil", "queue", "random", "secrets", "select", "selectors", "shutil", "signal",
        "socket", "ssl", "structlog", "subprocess", "sys", "tempfile", "threading", "time",
        "urllib", "uuid",
    }
)  # fmt: skip
_IMPURE_CALLS = frozenset({"open", "input", "print", "exec", "eval", "__import__"})
_DUMPING_GROUND = re.compile(r"(^|_)(utils?|helpers?|common|misc)(_|$)")
_KERNEL_FILE = re.compile(r"/(sys|proc)(/|\Z)")
_SUBJECT_OR_KEY = re.compile(r"cf\.\w+[.{]|cf\.\Z|/corefleet/")
_FLEET_ROOTS = frozenset({"agentctl/verbs/up.py", "agentctl/local/fleet.py"})
_ENVIRONMENT_READERS = frozenset({"corefleet/config.py", "corefleet/paths.py"})
_ENVIRONMENT_NAMES = frozenset({"environ", "environb", "getenv", "getenvb"})


def is_pure(path: str) -> bool:
    """Whether docs/architecture.md asks the module to be pure."""
    return (
        path in _LEAVES
        or path.startswith("corefleet/messages/")
        or path in _PURE
        or (path.startswith(PROGRAMS) and "core" in PurePosixPath(path).parts[1:-1])
    )


def purity(path: str, tree: ast.Module) -> Iterator[str]:
    """Pure modules import no clock, I/O, randomness or logging, and call no I/O built-in."""
    if not is_pure(path):
        return
    for line, name in imports(path, tree):
        if name.split(".")[0] in _IMPURE:
            yield f"{path}:{line}: a pure module imports {name}"
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in _IMPURE_CALLS
        ):
            yield f"{path}:{node.lineno}: a pure module calls {node.func.id}()"


def sizes(path: str, source: str, tree: ast.Module) -> Iterator[str]:
    """A module has at most 500 lines, a function 60, its signature and docstring included."""
    lines = source.count("\n")
    if lines > MODULE_LINES:
        yield f"{path}: {lines} lines; at most {MODULE_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield (
                    f"{path}:{node.lineno}: {node.name} has {length} lines; "
                    f"at most {FUNCTION_LINES}"
                )


def names(path: str) -> Iterator[str]:
    """No module or package is a dumping ground."""
    for part in PurePosixPath(path).parts:
        if _DUMPING_GROUND.search(part.removesuffix(".py")):
            yield f"{path}: `{part}` says nothing of what belongs there"


def kernel_files(path: str, tree: ast.Module) -> Iterator[str]:
    """Only agentd/hostfs.py spells a path below /sys or /proc."""
    if path == "agentd/hostfs.py" or not path.startswith(PACKAGES):
        return
    for line, text in _texts(tree):
        if _KERNEL_FILE.match(text):
            yield f"{path}:{line}: {text!r}; only agentd/hostfs.py opens /sys and /proc"


def spelling(path: str, tree: ast.Module) -> Iterator[str]:
    """Only corefleet/subjects.py spells a NATS subject or an etcd key."""
    if path == "corefleet/subjects.py" or not path.startswith(PACKAGES):
        return
    for line, text in _texts(tree):
        if _SUBJECT_OR_KEY.match(text):
            yield f"{path}:{line}: {text!r}; only corefleet/subjects.py spells subjects and keys"


def environment(path: str, tree: ast.Module) -> Iterator[str]:
    """Only the configuration reads the environment."""
    if path in _ENVIRONMENT_READERS or not path.startswith(PACKAGES):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            read = (
                node.attr in _ENVIRONMENT_NAMES
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
            )
        elif isinstance(node, ast.ImportFrom):
            read = node.module == "os" and any(
                alias.name in _ENVIRONMENT_NAMES for alias in node.names
            )
        else:
            continue
        if read:
            yield f"{path}:{node.lineno}: only corefleet/config.py reads the environment"


def adapters(path: str, tree: ast.Module) -> Iterator[str]:
    """Only composition roots (app modules, `agentctl up`), tests and tools name adapters."""
    pure_path = PurePosixPath(path)
    allowed = (
        path.startswith(("corefleet/adapters/", "tests/", "tools/"))
        or pure_path.name == "app.py"
        or path in _FLEET_ROOTS
    )
    if allowed:
        return
    for line, name in imports(path, tree):
        if name == "corefleet.adapters" or name.startswith("corefleet.adapters."):
            yield f"{path}:{line}: imports {name}; only app modules name adapters"


def exports_only(path: str, tree: ast.Module) -> Iterator[str]:
    """An __init__ holds a docstring, imports and __all__, nothing else."""
    if PurePosixPath(path).name != "__init__.py":
        return
    for node in tree.body:
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_all = (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id == "__all__"
        )
        if not (is_docstring or is_all or isinstance(node, ast.Import | ast.ImportFrom)):
            yield f"{path}:{node.lineno}: an __init__ holds exports only"


def imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of everything imported, at any depth of nesting.

    `from a import b` yields `a.b`, whether b is a module or not.
    """
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def cycles(graph: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the sets of modules that import each other, directly or through others."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting.extend(graph.get(module, ()))
        reach[start] = seen
    knots = {
        tuple(sorted(other for other in reach[module] if module in reach.get(other, ())))
        for module in graph
        if module in reach[module]
    }
    return [list(knot) for knot in sorted(knots)]


def module_graph(sources: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """Return which of `sources` (by path) imports which, type-only and lazy ones included."""
    by_name = {_module_name(path): path for path in sources}

    def target(name: str) -> str | None:
        return by_name.get(name) or by_name.get(name.rpartition(".")[0])

    return {
        path: {found for _, name in imports(path, tree) if (found := target(name))} - {path}
        for path, tree in sources.items()
    }


def _module_name(path: str) -> str:
    return path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")


def _texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and value of every string that is not a docstring or a lone statement."""
    lone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in lone:
            yield node.lineno, node.value
