"""Guests to roll out to: Debian as it is after its first boot, with nothing of the project."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from agentctl.local.processes import free_port
from tools.guest.cache import guest_cache, held, keep_newest, key_of, made_once
from tools.guest.guest import Guest
from tools.guest.image import Image, ensure_image
from tools.guest.layout import SSH_PORT, Layout
from tools.guest.machine import Machine
from tools.guest.prepare import booted
from tools.guest.steps import Steps

LAYOUT = Layout(nodes=2, cpus_per_node=1, node_memory_mb=1280)
_KEPT = 2


@contextmanager
def bare_state(steps: Steps) -> Iterator[tuple[Image, Path]]:
    """The image and a saved machine that has booted it; nobody throws them away meanwhile."""
    with ExitStack() as stack:
        with steps.step("image"):
            image = ensure_image(LAYOUT.arch)
            stack.enter_context(held(image.directory))

        def make(into: Path) -> None:
            with booted(LAYOUT, image, steps=steps) as guest:
                guest.must("systemctl is-system-running --wait; sync", 300.0)
                guest.close()
                guest.machine.save(into)

        with steps.step("bare machine"):
            state = made_once(f"bare-{key_of(image.key, LAYOUT.key)}", make)
            stack.enter_context(held(state))
        keep_newest(guest_cache(), "bare-", _KEPT)
        yield image, state


@contextmanager
def bare_guest(
    image: Image, state: Path, name: str, forwards: Mapping[int, int], steps: Steps
) -> Iterator[Guest]:
    """A machine of its own with the right time and the host name `name`."""
    port = free_port()
    with ExitStack() as stack:
        with steps.step(f"restore {name}"):
            machine = stack.enter_context(
                Machine(LAYOUT, image, saved=state, forwards={port: SSH_PORT, **forwards})
            )
            guest = stack.enter_context(Guest(machine, image.identity, port))
            guest.must(f"date -s @{time.time():.3f} && hostname {shlex.quote(name)}")
        yield guest
