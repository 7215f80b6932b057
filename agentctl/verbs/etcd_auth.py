"""agentctl etcd-auth"""

from __future__ import annotations

import click

from agentctl.boundary import verb
from agentctl.etcd_auth import set_up
from agentctl.output import as_json, data, say
from corefleet.tls import TlsFiles


@click.command("etcd-auth")
@click.option("--endpoint", default="127.0.0.1:2379", show_default=True, metavar="HOST:PORT")
@click.option("--ca", default="/etc/corefleet/pki/ca.pem", show_default=True)
@click.option("--cert", default="/etc/corefleet/pki/operator.pem", show_default=True)
@click.option("--key", default="/etc/corefleet/pki/operator.key", show_default=True)
@click.option("--dry-run", is_flag=True, help="Only say what would be done.")
@click.option("--json", "json_out", is_flag=True, help="Print JSON, one document a line.")
@verb
async def command(
    endpoint: str, ca: str, cert: str, key: str, dry_run: bool, json_out: bool
) -> int:
    """Let only controlds and operators into etcd: users, roles, and the switch, once.

    Prints what it did; nothing when all was as it must be. Exit codes: 0 done; 2 etcd refuses
    the certificate, or it cannot be used; 3 etcd is not reachable.
    """
    steps = await set_up(endpoint, TlsFiles(ca, cert, key), dry_run=dry_run)
    for step in steps:
        if json_out:
            as_json({"verb": step.verb, "user": step.user, "role": step.role})
        else:
            data(str(step))
    if not steps:
        say("nothing to do")
    return 0
