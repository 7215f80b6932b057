"""Put Prometheus and promtool into corefleet's cache: `python -m tools.prometheus_fetch`.

Only tests and the pictures of the dashboards need them. Tried in this order: what the cache
holds already, the programs on PATH, the package `prometheus` of this distribution, which
apt downloads and checks. It is only unpacked: nothing is installed, no root is needed, and
no service is started.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

from corefleet.config import cache_dir
from tools.etcd_fetch import (
    APT_SOURCES,
    FetchError,
    Source,
    download,
    from_first,
    link_program,
    os_release,
    read_sources,
)

PROGRAMS = ("prometheus", "promtool")
PACKAGE = "prometheus"


def version_of(program: Path) -> str | None:
    """Return what `program --version` says, None if it does not run here."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"version (\d+\.\d+\.\d+)", done.stdout + done.stderr)
    return match[1] if match else None


def fetch(target: Path) -> str:
    """Make `target`/prometheus and `target`/promtool run here; return their version.

    Raises FetchError with every reason when there is no way.
    """
    target.mkdir(parents=True, exist_ok=True)
    if (version := _version_in(target)) is not None:
        return version
    reasons = []
    for way in (_link_from_path, _unpack_package):
        try:
            way(target)
            break
        except FetchError as error:
            reasons.append(str(error))
    version = _version_in(target)
    if version is None:
        raise FetchError("\n  ".join(reasons) or "the programs do not run here")
    return version


def _version_in(target: Path) -> str | None:
    versions = {version_of(target / name) for name in PROGRAMS}
    return versions.pop() if len(versions) == 1 else None


def _link_from_path(target: Path) -> None:
    found = {name: shutil.which(name) for name in PROGRAMS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise FetchError(f"no {' and '.join(missing)} on PATH")
    for name, path in found.items():
        link_program(target, name, Path(str(path)))


def _unpack_package(target: Path) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise FetchError("no apt-get and dpkg here")
    own = os_release().get("VERSION_CODENAME", "")
    sources = [s for s in read_sources(APT_SOURCES) if own and own in s.suites]
    if not sources:
        raise FetchError(f"no archive of this distribution in {APT_SOURCES}")

    def unpack(work: Path, source: Source) -> None:
        tree = download(work, source, (PACKAGE,))
        for name in PROGRAMS:
            (tree / "usr" / "bin" / name).replace(target / name)

    from_first(target, sources, unpack)


def main() -> int:
    target = cache_dir() / "bin"
    try:
        version = fetch(target)
    except FetchError as error:
        print(
            f"No Prometheus could be had:\n  {error}\n"
            f"Install {' and '.join(PROGRAMS)} so that they are on PATH, or put both programs "
            f"into {target}.",
            file=sys.stderr,
        )
        return 1
    print(f"{target}: Prometheus {version}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
