"""Put an etcd program into corefleet's cache: `python -m tools.etcd_fetch`.

Tried in this order: what the cache holds already, etcd >= 3.5 on PATH, the package
`etcd-server` of a newer Debian suite, then etcd >= 3.4 on PATH or of the machine's own
suite. Packages are downloaded and checked by apt, from the archive that the machine is
configured for, with lists and cache of their own, and only unpacked: nothing is
installed and no root is needed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from corefleet.config import cache_dir

Version = tuple[int, int, int]

WANTED: Version = (3, 5, 0)
ENOUGH: Version = (3, 4, 0)
NEWER_SUITES = ("trixie",)
PROGRAMS = {"etcd": "etcd-server", "etcdctl": "etcd-client"}
APT_SOURCES = Path("/etc/apt")
APT_TIMEOUT_S = 300.0


class FetchError(Exception):
    """One way to an etcd did not work; the message says why."""


@dataclass(frozen=True)
class Source:
    """One entry of apt's sources; `file` is the name under which apt reads its format."""

    file: str
    text: str
    suites: tuple[str, ...]
    components: tuple[str, ...]

    def for_suite(self, suite: str) -> Source:
        """Return the same archive with `suite` in the place of its own suites."""
        if self.file.endswith(".sources"):
            text = re.sub(r"(?im)^suites:.*(\n[ \t].*)*", f"Suites: {suite}", self.text)
        else:
            text = re.sub(rf"\s{re.escape(self.suites[0])}\s", f" {suite} ", self.text, count=1)
        return Source(self.file, text, (suite,), self.components)


def read_sources(root: Path) -> Iterator[Source]:
    """Yield the enabled binary sources below apt's configuration directory `root`."""
    parts = root / "sources.list.d"
    for path in sorted(parts.glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text(encoding="utf-8")):
            source = parse_stanza(stanza)
            if source is not None:
                yield source
    for path in [root / "sources.list", *sorted(parts.glob("*.list"))]:
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                source = parse_line(line)
                if source is not None:
                    yield source


def parse_stanza(stanza: str) -> Source | None:
    """Return the source of a deb822 stanza, None if it is disabled or has no binaries."""
    lines = [line for line in stanza.splitlines() if line.strip() and not line.startswith("#")]
    text = "\n".join(lines) + "\n"
    fields: dict[str, str] = {}
    for match in re.finditer(r"(?m)^([\w-]+):(.*(?:\n[ \t].*)*)", text):
        fields[match[1].lower()] = match[2].strip()
    if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes") == "no":
        return None
    return Source(
        "fetch.sources",
        text,
        tuple(fields.get("suites", "").split()),
        tuple(fields.get("components", "").split()),
    )


def parse_line(line: str) -> Source | None:
    """Return the source of a line such as `deb [options] URI suite component ...`."""
    match = re.match(r"deb\s+(?:\[[^]]*\]\s+)?\S+\s+(\S+)\s+([^#]+)", line)
    if match is None:
        return None
    return Source("fetch.list", line + "\n", (match[1],), tuple(match[2].split()))


def version_of(program: Path) -> Version | None:
    """Return what `program --version` says, None if it does not run here."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"etcd(?:ctl)? version: (\d+)\.(\d+)\.(\d+)", done.stdout, re.IGNORECASE)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def os_release() -> dict[str, str]:
    """Return the fields of os-release(5), none where there is no such file."""
    try:
        return platform.freedesktop_os_release()
    except OSError:
        return {}


def spell(version: Version) -> str:
    return ".".join(map(str, version))


def link_from_path(target: Path, least: Version) -> None:
    """Link `target`/etcd (and etcdctl) to the programs on PATH; raises FetchError."""
    found = shutil.which("etcd")
    if found is None:
        raise FetchError("no etcd on PATH")
    version = version_of(Path(found))
    if version is None or version < least:
        shown = "does not run" if version is None else f"is {spell(version)}"
        raise FetchError(f"{found} {shown}; {spell(least)} or newer is wanted")
    for name in PROGRAMS:
        program = shutil.which(name)
        if program is not None:
            link_program(target, name, Path(program))


def link_program(target: Path, name: str, program: Path) -> None:
    """Make `target`/`name` a link to `program`; who looks there finds the old one or the new."""
    with tempfile.TemporaryDirectory(dir=target) as work:
        link = Path(work) / name
        link.symlink_to(program.resolve())
        link.replace(target / name)


def unpack_package(target: Path, suite: str, least: Version) -> None:
    """Put etcd from the packages of `suite` into `target`; raises FetchError."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise FetchError(f"suite {suite}: no apt-get and dpkg here")
    own = os_release().get("VERSION_CODENAME", "")
    sources = [s for s in read_sources(APT_SOURCES) if own in s.suites and "main" in s.components]
    if not own or not sources:
        raise FetchError(f"suite {suite}: no archive of this distribution in {APT_SOURCES}")
    try:
        from_first(
            target, sources, lambda work, it: _unpack(work, target, it.for_suite(suite), least)
        )
    except FetchError as error:
        raise FetchError(f"suite {suite}: {error}") from error


def from_first(
    target: Path, sources: Sequence[Source], unpack: Callable[[Path, Source], None]
) -> None:
    """Call `unpack` with a scratch directory below `target` for each source until one serves.

    Raises FetchError with what each lacked.
    """
    reasons = []
    for source in sources:
        with tempfile.TemporaryDirectory(dir=target) as work:
            # apt drops to a user of its own, who must be able to enter.
            os.chmod(work, 0o755)
            try:
                unpack(Path(work), source)
            except FetchError as error:
                reasons.append(str(error))
            else:
                return
    raise FetchError("; ".join(reasons))


def _unpack(work: Path, target: Path, source: Source, least: Version) -> None:
    tree = download(work, source, tuple(PROGRAMS.values()))
    version = version_of(tree / "usr" / "bin" / "etcd")
    if version is None or version < least:
        shown = "an etcd that does not run here" if version is None else f"etcd {spell(version)}"
        raise FetchError(f"components {' '.join(source.components)} have {shown}")
    for name in reversed(PROGRAMS):
        program = tree / "usr" / "bin" / name
        if program.is_file():
            program.replace(target / name)


def download(work: Path, source: Source, packages: tuple[str, ...]) -> Path:
    """Return a directory below `work` with the files of `packages`; raises FetchError."""
    listing = work / source.file
    listing.write_text(source.text, encoding="utf-8")
    for part in ("lists/partial", "cache/archives/partial", "packages", "tree"):
        (work / part).mkdir(parents=True)
    options = [
        "-qq",
        *("-o", f"Dir::Etc::sourcelist={listing}", "-o", "Dir::Etc::sourceparts=/dev/null"),
        *("-o", f"Dir::State::lists={work}/lists", "-o", f"Dir::Cache={work}/cache"),
        *("-o", "APT::Update::Error-Mode=any", "-o", "Acquire::Languages=none"),
        *("-o", "Acquire::Retries=2"),
    ]
    _run(["apt-get", *options, "update"], work)
    _run(["apt-get", *options, "download", *packages], work / "packages")
    for package in (work / "packages").glob("*.deb"):
        _run(["dpkg", "-x", str(package), str(work / "tree")], work)
    return work / "tree"


def _run(command: list[str], directory: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=APT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{command[0]} took more than {APT_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise FetchError(f"{command[0]} exited {done.returncode}: {lines[-1]}")


def fetch(target: Path) -> Version:
    """Make `target`/etcd a program that runs here and return its version.

    Raises FetchError with every reason when there is no way.
    """
    target.mkdir(parents=True, exist_ok=True)
    cached = version_of(target / "etcd")
    if cached is not None and cached >= WANTED:
        return cached
    release = os_release()
    ways = [partial(link_from_path, target, WANTED)]
    if release.get("ID") == "debian":
        ways += [partial(unpack_package, target, suite, WANTED) for suite in NEWER_SUITES]
    if cached is None or cached < ENOUGH:
        own = release.get("VERSION_CODENAME", "")
        ways += [partial(link_from_path, target, ENOUGH)]
        ways += [partial(unpack_package, target, own, ENOUGH)]
    reasons = []
    for way in ways:
        try:
            way()
            break
        except FetchError as error:
            reasons.append(str(error))
    version = version_of(target / "etcd")
    if version is None:
        raise FetchError("\n  ".join(dict.fromkeys(reasons)))
    return version


def main() -> int:
    target = cache_dir() / "bin"
    try:
        version = fetch(target)
    except FetchError as error:
        print(
            f"No etcd could be had:\n  {error}\n"
            f"Install etcd {spell(WANTED)} or newer so that it is on PATH, or put the program "
            f"at {target / 'etcd'}.",
            file=sys.stderr,
        )
        return 1
    print(f"{target / 'etcd'}: etcd {spell(version)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
