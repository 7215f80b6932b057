"""Make the archive that hosts are installed from: `python -m tools.package [DIRECTORY]`.

corefleet-<version>-<architecture>.tar.gz holds the directory <version>, which belongs below
/opt/corefleet: a virtual environment of the project with all that it depends on, the programs
etcd, etcdctl and nats-server beside its own in bin/, and the units and users of systemd in
share/systemd/. Its digest is in the file of the same name with `.sha256`.

It is for hosts with the Python of Debian 12 in /usr/bin. The dependencies are kept in the
cache; hosts need no network.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import sys
from pathlib import Path

import click

from corefleet.adapters.servers import find_etcd, find_nats_server
from tools import wheelhouse
from tools.guest import payload
from tools.guest.cache import LOG, guest_cache, held, keep_newest, key_of, made_once
from tools.guest.errors import GuestError
from tools.guest.host import run
from tools.guest.image import PYTHON

HOME = Path("/opt/corefleet")
UNITS = "share/systemd"

_PIP_LIMIT_S = 900.0
_PACK_LIMIT_S = 900.0
_KEPT = 3
_OUR_PYTHON = "/usr/bin/python3"


@click.command(help=__doc__)
@click.argument("directory", type=click.Path(path_type=Path), default=Path("dist"))
def main(directory: Path) -> None:
    """Write the archive into DIRECTORY and say where it is."""
    try:
        print(build(directory))
    except GuestError as error:
        print(f"package: {error}", file=sys.stderr)
        sys.exit(1)


def build(directory: Path, root: Path = payload.ROOT) -> Path:
    """Write the archive of the checkout `root` and return its path; raises GuestError.

    One that was made from the same sources is taken from the cache.
    """
    version = payload.version(root)
    name = f"corefleet-{version}-{platform.machine()}.tar.gz"
    dependencies = _dependencies()
    units = sorted((root / "systemd").iterdir())
    servers = {"etcd": find_etcd(), "etcdctl": find_etcd().with_name("etcdctl")}
    servers["nats-server"] = find_nats_server()
    key = key_of(
        dependencies.name,
        payload.source_key(root),
        *(unit.read_bytes() for unit in units),
        *(hashlib.sha256(server.read_bytes()).digest() for server in servers.values()),
        Path(__file__).read_bytes(),
    )

    def make(scratch: Path) -> None:
        home = scratch / version
        log = scratch / LOG
        shutil.copytree(dependencies / "home", home, symlinks=True)
        site = scratch / "site"
        payload.lay_out_project(site, log, platform.machine(), root)
        shutil.copytree(site, _site(home), dirs_exist_ok=True)
        _add_programs(home, version, root)
        for program, file in servers.items():
            shutil.copy(file.resolve(), home / "bin" / program)
        (home / UNITS).mkdir(parents=True)
        for unit in units:
            shutil.copyfile(unit, home / UNITS / unit.name)
        pack = ["--sort=name", "--owner=0", "--group=0", "--numeric-owner"]
        compressed = ["--use-compress-program", "gzip -1"]
        archive = scratch / name
        run(["tar", "-C", scratch, *pack, *compressed, "-cf", archive, version], log, _PACK_LIMIT_S)
        for directory in (home, site):
            shutil.rmtree(directory)

    with held(dependencies):
        made = made_once(f"release-{key}", make)
    keep_newest(guest_cache(), "release-", _KEPT)
    directory.mkdir(parents=True, exist_ok=True)
    archive = directory / name
    with held(made):
        shutil.copyfile(made / name, archive)
    archive.with_name(f"{name}.sha256").write_text(f"{sha256(archive)}  {name}\n")
    return archive


def sha256(file: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()


def _dependencies() -> Path:
    """Return the directory of the cache whose `home` has all that the project depends on."""
    machine = platform.machine()
    extras = set(payload.TEST_REQUIREMENTS)
    requirements = [each for each in payload.project_requirements() if each not in extras]
    recipe = wheelhouse.Recipe()
    llama = wheelhouse.ensure(recipe, wheelhouse.wheels_dir(), sys.stderr)
    constraints = payload.ROOT / "constraints.txt"
    key = key_of(
        machine,
        *requirements,
        constraints.read_bytes(),
        recipe.key,
        Path(__file__).read_bytes(),
    )

    def make(scratch: Path) -> None:
        log = scratch / LOG
        home = scratch / "home"
        wheels = scratch / "wheels"
        options: list[str | Path] = ["--constraint", constraints, "--find-links", llama]
        command = [*payload.pip("download", machine), "--dest", wheels, *options, *requirements]
        run(command, log, _PIP_LIMIT_S)
        _site(home).mkdir(parents=True)
        payload.lay_out([*wheels.glob("*.whl")], _site(home), log, machine)
        shutil.rmtree(wheels)
        (home / "bin").mkdir()
        (home / "bin/python3").symlink_to(_OUR_PYTHON)
        (home / "bin/python").symlink_to("python3")
        (home / "pyvenv.cfg").write_text(
            f"home = {Path(_OUR_PYTHON).parent}\ninclude-system-site-packages = false\n"
            f"version = {PYTHON}\n"
        )

    made = made_once(f"dependencies-{key}", make)
    keep_newest(guest_cache(), "dependencies-", _KEPT)
    return made


def _site(home: Path) -> Path:
    return home / "lib" / f"python{PYTHON}" / "site-packages"


def _add_programs(home: Path, version: str, root: Path) -> None:
    for name, target in payload.commands(root).items():
        module, _, function = target.partition(":")
        script = home / "bin" / name
        script.write_text(
            f"#!{HOME / version}/bin/python\nimport sys\nfrom {module} import {function}\n"
            f"sys.exit({function}())\n"
        )
        script.chmod(0o755)


if __name__ == "__main__":
    main(prog_name="python -m tools.package")
