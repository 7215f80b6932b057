"""agentctl pki rotate-ca"""

from __future__ import annotations

from pathlib import Path

import click

from agentctl.boundary import local_verb
from agentctl.options import json_option
from agentctl.pki_options import ca_argument
from agentctl.pki_view import show_state
from corefleet.pki import CertificateAuthority
from corefleet.pki.authority import CA_DAYS
from corefleet.pki.rotation import Pass


@click.group("rotate-ca")
def rotate_ca() -> None:
    """Replace the CA in three passes; between them every host gets the new files (docs/pki.md)."""


@rotate_ca.command("begin")
@ca_argument
@click.option("--days", type=float, default=CA_DAYS, show_default=True)
@json_option
@local_verb
def begin(directory: Path, days: float, json_out: bool) -> int:
    """Make the next CA: ca.pem then holds both. Bring it to every host."""
    return _rotate(directory, "begin", json_out, days)


@rotate_ca.command("switch")
@ca_argument
@json_option
@local_verb
def switch(directory: Path, json_out: bool) -> int:
    """Let the next CA sign. Issue every certificate anew afterwards."""
    return _rotate(directory, "switch", json_out)


@rotate_ca.command("finish")
@ca_argument
@click.option("--force", is_flag=True, help="Even if holders have only the old CA's certificates.")
@json_option
@local_verb
def finish(directory: Path, force: bool, json_out: bool) -> int:
    """Drop the old CA from ca.pem, and its key. Bring ca.pem to every host."""
    return _rotate(directory, "finish", json_out, force=force)


@rotate_ca.command("status")
@ca_argument
@json_option
@local_verb
def status(directory: Path, json_out: bool) -> int:
    """Say how far a rotation is, and who still has only the old CA's certificates."""
    show_state(CertificateAuthority.load(directory), False, json_out)
    return 0


def _rotate(
    directory: Path, step: Pass, json_out: bool, days: float = CA_DAYS, force: bool = False
) -> int:
    ca = CertificateAuthority.load(directory)
    changed = ca.rotate(step, days, force)
    show_state(ca, changed, json_out)
    return 0
