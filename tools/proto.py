"""Generates corefleet/rpc from proto/, or checks that it is current.

python -m tools.proto           # write
python -m tools.proto --check   # exit 1 and name the files that are not current
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
RPC = ROOT / "corefleet" / "rpc"

_PACKAGE = "corefleet/v1"
_IMPORT = re.compile(r"^from corefleet\.v1 import ", re.MULTILINE)
_INIT = '"""Generated from proto/corefleet/v1 by `make proto`; do not edit."""\n'


def generate() -> dict[str, str]:
    """Return the text of every file that belongs into corefleet/rpc, by name."""
    from grpc_tools import protoc

    sources = sorted(path.relative_to(PROTO).as_posix() for path in PROTO.rglob("*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as scratch:
        status = protoc.main(
            [
                "protoc",
                f"-I{PROTO}",
                f"-I{well_known}",
                f"--python_out={scratch}",
                f"--pyi_out={scratch}",
                f"--grpc_python_out={scratch}",
                *sources,
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc failed with status {status}")
        made = {"__init__.py": _INIT}
        for path in sorted((Path(scratch) / _PACKAGE).iterdir()):
            text = path.read_text(encoding="utf-8")
            made[path.name] = _IMPORT.sub("from corefleet.rpc import ", text)
    return made


def differences(made: dict[str, str], directory: Path) -> list[str]:
    """Return one line for each file of `directory` that is not what `made` says."""
    found = []
    for name, text in made.items():
        path = directory / name
        if not path.exists():
            found.append(f"{name}: missing")
        elif path.read_text(encoding="utf-8") != text:
            found.append(f"{name}: differs from what proto/ says")
    found.extend(
        f"{path.name}: no proto file makes it"
        for path in sorted(directory.glob("*.py*"))
        if path.is_file() and path.name not in made
    )
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.proto", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if not current")
    check = parser.parse_args(arguments).check
    made = generate()
    stale = differences(made, RPC)
    if check:
        for line in stale:
            print(f"corefleet/rpc/{line}", file=sys.stderr)
        if stale:
            print("run `make proto` and commit the result", file=sys.stderr)
        return 1 if stale else 0
    RPC.mkdir(parents=True, exist_ok=True)
    for path in RPC.glob("*.py*"):
        if path.is_file() and path.name not in made:
            path.unlink()
    for name, text in made.items():
        (RPC / name).write_text(text, encoding="utf-8")
    print(f"wrote {len(made)} files to {RPC.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
