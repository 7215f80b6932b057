"""agentctl nats-config"""

from __future__ import annotations

from pathlib import Path

import click

from agentctl.boundary import verb
from agentctl.output import data
from corefleet.errors import InvalidInput
from corefleet.identity import Identity
from corefleet.ids import check_name
from corefleet.nats_config import Member, NatsServerPlan, parse_nodes, render


@click.command("nats-config")
@click.argument("name")
@click.option(
    "--node-list",
    type=click.Path(path_type=Path),
    required=True,
    help="Nodes that may come: a line each, `NODE RACK` or `NODE`.",
)
@click.option("--controld", "controlds", multiple=True, required=True, metavar="NAME")
@click.option("--operator", "operators", multiple=True, metavar="NAME")
@click.option("--listen", default="0.0.0.0:4222", show_default=True, metavar="HOST:PORT")
@click.option("--monitor", default="127.0.0.1:8222", show_default=True, metavar="HOST:PORT")
@click.option("--cluster", default="", metavar="HOST:PORT", help="Where other servers come in.")
@click.option(
    "--route", "routes", multiple=True, metavar="HOST:PORT", help="Each server's --cluster."
)
@click.option("--store-dir", default="/var/lib/corefleet-nats", show_default=True)
@click.option("--max-file-bytes", type=click.IntRange(min=0), default=0, help="0: by the disk.")
@click.option("--pki", default="/etc/corefleet/pki", show_default=True, metavar="DIR")
@verb
async def command(
    name: str,
    node_list: Path,
    controlds: tuple[str, ...],
    operators: tuple[str, ...],
    listen: str,
    monitor: str,
    cluster: str,
    routes: tuple[str, ...],
    store_dir: str,
    max_file_bytes: int,
    pki: str,
) -> int:
    """Print nats.conf for the server NAME: mutual TLS, and who may say and hear what.

    The same members give the same text. After a change of it nats-server needs a SIGHUP, which
    ends the connections of who is not in it any more. Exit codes: 0 done; 2 wrong input.
    """
    members = parse_nodes(_read(node_list))
    members += [Member(Identity("controld", check_name("controld", each))) for each in controlds]
    members += [Member(Identity("operator", check_name("operator", each))) for each in operators]
    plan = NatsServerPlan(
        name=name,
        listen=listen,
        store_dir=store_dir,
        monitor=monitor,
        ca=f"{pki}/ca.pem",
        cert=f"{pki}/nats.pem",
        key=f"{pki}/nats.key",
        cluster_listen=cluster,
        routes=routes,
        max_file_bytes=max_file_bytes,
    )
    data(render(plan, members).removesuffix("\n"))
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise InvalidInput(
            "--node-list", str(path), f"a readable file ({error.strerror})"
        ) from None
    except UnicodeDecodeError:
        raise InvalidInput("--node-list", str(path), "a file of text") from None
