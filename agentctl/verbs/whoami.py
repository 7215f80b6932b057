"""agentctl whoami"""

from __future__ import annotations

import datetime

import click

from agentctl.boundary import verb
from agentctl.options import address_option, connect, json_option
from agentctl.output import as_json, data, say, table


@click.command("whoami")
@address_option
@json_option
@verb
async def command(addresses: tuple[str, ...], json_out: bool) -> int:
    """Say whom the fleet takes you for, and what you may do there.

    The name is the one that the audit log, `agentctl get` and refusals use.
    """
    async with connect(addresses) as client:
        found = await client.whoami()
    if json_out:
        as_json(found)
        return 0
    data(found.name)
    if found.groups:
        say(f"groups: {', '.join(found.groups)}")
    if found.subject and found.identity:
        say(f"the certificate is that of {found.identity}; the token speaks")
    if found.expires_ms:
        until = datetime.datetime.fromtimestamp(found.expires_ms / 1000, datetime.UTC)
        say(f"the token is good until {until:%Y-%m-%d %H:%M:%S} UTC")
    if not found.rights:
        say("may do nothing here; whoever runs the fleet can grant more ([[auth.grants]])")
        return 0
    table(
        ("VERBS", "POOLS", "TENANTS"),
        [
            (" ".join(each.verbs), " ".join(each.pools), " ".join(each.tenants))
            for each in found.rights
        ],
    )
    return 0
