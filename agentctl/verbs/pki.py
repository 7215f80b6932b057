"""agentctl pki"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from agentctl.boundary import local_verb
from agentctl.durations import Duration, shown
from agentctl.options import json_option
from agentctl.output import as_json, data, say, table
from agentctl.pki_options import (
    HOST_DIRECTORY,
    PATH,
    batch_options,
    ca_argument,
    group_option,
    host_directory_option,
    identity_arguments,
)
from agentctl.pki_rotation import rotate_ca
from agentctl.pki_view import (
    DAY_S,
    date,
    entry_json,
    seen_json,
    seen_row,
    show_outcome,
    show_plan,
    whole_days,
)
from corefleet.errors import InvalidInput
from corefleet.identity import ROLES, Role
from corefleet.pki import CertificateAuthority, Want, batch, files, holding, index, inventory
from corefleet.pki.authority import CA_DAYS
from corefleet.pki.holding import Renewal
from corefleet.pki.inspection import inspect
from corefleet.pki.reading import load_key

_RENEW_BEFORE_S = 30 * DAY_S
_WARN_DAYS = 21.0
"""Less than 30 days before the end, when a certificate is renewed: that has failed by then."""
_FOUND_PROBLEMS = 1


@click.group("pki")
def command() -> None:
    """Make, renew and show the certificates of all programs.

    DIR is the directory of the certificate authority. Exit codes: 0 done or as it should be;
    1 a file could not be read or written, or `show` found a problem; 2 wrong input, nothing
    was done.
    """


@command.command("init")
@ca_argument
@click.option("--days", type=float, default=CA_DAYS, show_default=True)
@json_option
@local_verb
def init(directory: Path, days: float, json_out: bool) -> int:
    """Make a certificate authority in DIR. Whoever can read its keys can be anyone: guard it."""
    ca = CertificateAuthority.create(directory, days)
    if json_out:
        as_json({"changed": True, "signer": ca.state.signer, "ca": str(directory / files.BUNDLE)})
    else:
        data(str(directory / files.BUNDLE))
        say(f"made the CA {ca.state.signer}; back up {directory}, and let nobody else read it")
    return 0


def issue(
    directory: Path,
    role: Role | None,
    name: str | None,
    hosts: Sequence[str],
    list_file: Path | None,
    days: float,
    out: Path,
    renew_before_s: int | None,
    dry_run: bool,
    group: str | None,
    json_out: bool,
) -> int:
    """Make a key and a certificate for ROLE NAME, or for all of a list.

    Written are OUT/ROLE.pem, OUT/ROLE.key and OUT/ca.pem; from a list OUT/ROLE/NAME/ROLE.pem
    and .key. Key and certificate are replaced together.
    """
    wants = _wants(role, name, hosts, list_file)
    many = list_file is not None
    _make(directory, wants, out, many, days, renew_before_s, dry_run, json_out, group=group)
    return 0


def _issue_command(name: str, renew_before_s: int | None) -> click.Command:
    run = local_verb(issue)
    for add in (
        group_option,
        batch_options(renew_before_s),
        identity_arguments(False),
        ca_argument,
    ):
        run = add(run)
    return click.command(name)(run)


command.add_command(_issue_command("issue", None))
command.add_command(_issue_command("renew", _RENEW_BEFORE_S))


@command.command("sign")
@ca_argument
@identity_arguments(False)
@click.option(
    "--csr",
    type=PATH,
    required=True,
    help="The request; from a list the directory with CSR/ROLE/NAME/ROLE.csr.",
)
@batch_options(None)
@local_verb
def sign(
    directory: Path,
    role: Role | None,
    name: str | None,
    hosts: Sequence[str],
    csr: Path,
    list_file: Path | None,
    days: float,
    out: Path,
    renew_before_s: int | None,
    dry_run: bool,
    json_out: bool,
) -> int:
    """Sign requests whose names are exactly those of ROLE NAME and its hosts, or of a list.

    The keys stay where `request` made them. A holder of a list without a request needs none
    while its certificate in OUT is good.
    """
    many = list_file is not None
    wants = []
    for want in _wants(role, name, hosts, list_file):
        path = holding.place(csr, want.identity) / f"{want.identity.role}.csr" if many else csr
        pem = files.read("--csr", path) if path.exists() or not many else None
        wants.append(Want(want.identity, want.hosts, pem))
    _make(directory, wants, out, many, days, renew_before_s, dry_run, json_out, sign_only=True)
    return 0


def _make(
    directory: Path,
    wants: Sequence[Want],
    out: Path,
    many: bool,
    days: float,
    renew_before_s: int | None,
    dry_run: bool,
    json_out: bool,
    group: str | None = None,
    sign_only: bool = False,
) -> None:
    """Make what is missing and print it."""
    if renew_before_s is not None and renew_before_s >= days * DAY_S:
        raise InvalidInput(
            "--renew-before", shown(renew_before_s), f"less than the {days:g} days of --days"
        )
    ca, gid = CertificateAuthority.load(directory), files.group_id(group)
    missing = batch.lacks(
        wants,
        lambda want: holding.place(out, want.identity) if many else out,
        Renewal(time.time(), renew_before_s, ca.state.signer),
        sign_only,
    )
    for lack in missing:
        if sign_only and lack.want.csr_pem is None:
            raise InvalidInput("--csr", str(lack.want.identity), f"a request: {lack.reason}")
    unchanged = len(wants) - len(missing)
    if dry_run:
        show_plan(missing, batch.bundle_differs(ca, out), unchanged, json_out)
        return
    changes, bundle_changed = batch.issue(ca, missing, out, days, gid)
    show_outcome(changes, bundle_changed, unchanged, json_out)


@command.command("request")
@identity_arguments(True)
@host_directory_option
@click.option("--renew-before", "renew_before_s", type=Duration(), default=_RENEW_BEFORE_S)
@json_option
@local_verb
def request(
    role: Role,
    name: str,
    hosts: Sequence[str],
    directory: Path,
    renew_before_s: int,
    json_out: bool,
) -> int:
    """Make a key on this host, and a request for its certificate, unless the present one is good.

    The key waits in DIR as ROLE.next.key until `install`; asked again, the same request is it.
    """
    want = inventory.want(role, name, hosts)
    renewal = Renewal(time.time(), renew_before_s, holding.signer_of(directory))
    why = holding.reason_to_issue(directory, want, renewal)
    path, changed = holding.request(directory, want) if why else (None, False)
    if json_out:
        csr = str(path) if path else None
        as_json({"changed": changed, "needed": bool(why), "reason": why, "csr": csr})
    elif path:
        data(str(path))
        say(f"{why}: sign this with `agentctl pki sign`, then `agentctl pki install`")
    else:
        say(f"{directory / f'{role}.pem'} is good")
    return 0


@command.command("install")
@click.argument("role", type=click.Choice(ROLES))
@click.option("--cert", type=PATH, required=True, help="The certificate.")
@click.option("--key", type=PATH, help="Its key. Default: the one that `request` made.")
@host_directory_option
@group_option
@json_option
@local_verb
def install(
    role: Role, cert: Path, key: Path | None, directory: Path, group: str | None, json_out: bool
) -> int:
    """Put a certificate in place together with its key.

    DIR/ca.pem is there before: a certificate that none of its CAs signed is refused.
    """
    changed = holding.install(
        directory,
        role,
        files.read("--cert", cert),
        files.group_id(group),
        load_key(files.read("--key", key), key) if key else None,
    )
    if json_out:
        as_json({"changed": changed, "cert": str(directory / f"{role}.pem")})
    else:
        say(f"{directory / f'{role}.pem'} {'installed' if changed else 'was there already'}")
    return 0


@command.command("show")
@click.argument("paths", metavar="[PATH]...", nargs=-1, type=PATH)
@click.option(
    "--warn-days", type=float, default=_WARN_DAYS, show_default=True, help="What is soon."
)
@json_option
@local_verb
def show(paths: tuple[Path, ...], warn_days: float, json_out: bool) -> int:
    """Show the certificates in files and directories; /etc/corefleet/pki without any.

    Exit code 1 when one is over, or ends within --warn-days, when the key beside it is not its
    own or is readable by others, or when no CA of the ca.pem beside it signed it.
    """
    seen = inspect(paths or (HOST_DIRECTORY,), time.time(), warn_days * DAY_S)
    if json_out:
        for each in seen:
            as_json(seen_json(each))
    else:
        table(
            ("FILE", "WHO", "ISSUER", "HOSTS", "NOT AFTER", "DAYS", "PROBLEMS"),
            [seen_row(each) for each in seen],
        )
    return _FOUND_PROBLEMS if any(each.problems for each in seen) else 0


@command.command("list")
@ca_argument
@click.option("--all", "everything", is_flag=True, help="Also what was replaced since.")
@json_option
@local_verb
def list_issued(directory: Path, everything: bool, json_out: bool) -> int:
    """List the newest certificate of every holder, as the CA's index knows them."""
    entries = CertificateAuthority.load(directory).issued
    chosen = entries if everything else index.newest(entries)
    if json_out:
        for entry in chosen:
            as_json(entry_json(entry))
        return 0
    now_s = time.time()
    table(
        ("ROLE", "NAME", "HOSTS", "NOT AFTER", "DAYS", "CA", "SERIAL"),
        [
            (
                entry.role, entry.name, " ".join(entry.hosts) or "-", date(entry.not_after_s),
                whole_days(entry.not_after_s - now_s), entry.ca, entry.serial,
            )
            for entry in chosen
        ],
    )  # fmt: skip
    return 0


command.add_command(rotate_ca)


def _wants(
    role: Role | None, name: str | None, hosts: Sequence[str], list_file: Path | None
) -> list[Want]:
    if list_file is not None:
        if hosts or role:
            raise InvalidInput("--from", str(list_file), "no ROLE NAME and no --host beside it")
        return inventory.parse(_list_text(list_file), str(list_file))
    if role is None or name is None:
        raise InvalidInput("ROLE NAME", role, "both of them, or a list with --from")
    return [inventory.want(role, name, hosts)]


def _list_text(path: Path) -> str:
    raw = sys.stdin.buffer.read() if str(path) == "-" else files.read("--from", path)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidInput("--from", str(path), f"UTF-8 text (byte {error.start} is not)") from None
