"""Guests that are ready to use: booted and installed once, saved, then restored in seconds.

Two states are kept in the cache. `base` has all dependencies installed and depends on the
image, constraints.txt and the layout. `app` is the base with the checkout's own wheel; only
the newest few are kept.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentctl.local.processes import free_port
from tools.guest import install, payload
from tools.guest.cache import LOG, guest_cache, held, keep_newest, key_of, made_once
from tools.guest.guest import Guest
from tools.guest.host import PACKAGES, need
from tools.guest.image import Image, ensure_image
from tools.guest.layout import SSH_PORT, Layout
from tools.guest.machine import Machine
from tools.guest.steps import Steps

BOOT_LIMIT_S = 360.0
"""40 s on two idle cores, 130 s were seen on busy ones; a guest boots once in its life."""

_KEPT = 3
"""Of each kind in the cache: a layout, a branch or an architecture of its own each."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A saved guest with the project installed in /opt/corefleet/<version>."""

    layout: Layout
    image: Image
    packages: Path
    state: Path


@contextmanager
def prepared(layout: Layout, steps: Steps) -> Iterator[Prepared]:
    """Prepare what is not cached and keep it from being thrown away meanwhile.

    With an empty cache this takes minutes and the network. Raises GuestError.
    """
    need(PACKAGES)
    with ExitStack() as stack:
        with steps.step("image"):
            image = ensure_image(layout.arch)
            stack.enter_context(held(image.directory))
        with steps.step("packages of the dependencies"):
            packages = payload.ensure_payload()
            stack.enter_context(held(packages))
        recipe = Path(install.__file__).read_bytes()
        base_key = key_of(image.key, packages.name, layout.key, recipe)
        with steps.step("base state"):
            base = made_once(
                f"base-{base_key}", lambda into: _make_base(layout, image, packages, into, steps)
            )
            stack.enter_context(held(base))
        before = Prepared(layout, image, packages, base)
        app_key = key_of(base_key, payload.source_key())
        with steps.step("state with the checkout"):
            app = made_once(f"app-{app_key}", lambda into: _make_app(before, into, steps))
            stack.enter_context(held(app))
        for kind in ("image-", "payload-", "base-", "app-"):
            keep_newest(guest_cache(), kind, _KEPT)
        yield Prepared(layout, image, packages, app)


@contextmanager
def booted(
    layout: Layout, image: Image, disk: Path | None = None, steps: Steps | None = None
) -> Iterator[Guest]:
    """A guest that starts from the image, with nothing installed; `disk` is its /dev/vdb."""
    steps = steps or Steps()
    port = free_port()
    with Machine(layout, image, payload=disk, forwards={port: SSH_PORT}) as machine:
        with steps.step("boot"):
            machine.wait_booted(BOOT_LIMIT_S)
        with Guest(machine, image.identity, port) as guest:
            yield guest


@contextmanager
def restored(
    ready: Prepared,
    name: str = "guest",
    *,
    forwards: Mapping[int, int] | None = None,
    steps: Steps | None = None,
) -> Iterator[Guest]:
    """A fresh copy of a prepared guest, with the right time and the host name `name`.

    `forwards`: from free ports of the host's loopback address to ports of the guest.
    """
    steps = steps or Steps()
    port = free_port()
    with ExitStack() as stack:
        with steps.step(f"restore {name}"):
            machine = stack.enter_context(
                Machine(
                    ready.layout,
                    ready.image,
                    payload=ready.packages / payload.DISK,
                    saved=ready.state,
                    forwards={port: SSH_PORT, **(forwards or {})},
                )
            )
            guest = stack.enter_context(Guest(machine, ready.image.identity, port))
            guest.must(f"date -s @{time.time():.3f} && hostname {shlex.quote(name)}")
        yield guest


def _make_base(layout: Layout, image: Image, packages: Path, into: Path, steps: Steps) -> None:
    with booted(layout, image, packages / payload.DISK, steps) as guest:
        install.install_dependencies(guest)
        _save(guest, into, steps)


def _make_app(base: Prepared, into: Path, steps: Steps) -> None:
    site = into / "site"
    with steps.step("build the project's wheel"):
        payload.lay_out_project(site, into / LOG)
    with restored(base, steps=steps) as guest:
        install.install_project(guest, site, steps)
        _save(guest, into, steps)
    shutil.rmtree(site)


def _save(guest: Guest, into: Path, steps: Steps) -> None:
    with steps.step("save the state"):
        guest.close()
        guest.machine.save(into)
