"""agentctl: drive a corefleet from the command line.

Exit codes: 0 done; 1 the task or operation failed; 2 wrong input, nothing was done;
3 the fleet is not reachable or has no room now; 5 it does not know you, or you may not do
this; 130 interrupted. `drain` has one more.
"""

from __future__ import annotations

from importlib import import_module

import click

VERBS = {
    "up": "Run a whole fleet on this machine, in the foreground.",
    "demo": "Show one agent at work, and its node being killed.",
    "run": "Submit a task and follow it to its end.",
    "submit": "Submit a task and print its id.",
    "get": "Show a task as it stands.",
    "watch": "Follow a task to its end.",
    "ls": "List live tasks.",
    "cancel": "End a task.",
    "trace": "Show every attempt and step of a task, with times.",
    "explain": "Say why a task is placed where it is.",
    "top": "Watch nodes, pools and controlds at work.",
    "nodes": "List nodes.",
    "node": "Show one node, or record this machine's topology for a bug report.",
    "drain": "Free a node of tasks, and wait until it is.",
    "undrain": "Use a drained node again.",
    "pools": "List or apply pools.",
    "controlds": "List controlds and what they own.",
    "pki": "Make, renew and show the certificates of all programs.",
    "whoami": "Say whom the fleet takes you for, and what you may do.",
    "model": "Fetch a model file.",
    "doctor": "Check a client, a control node or a node, and say what to do.",
    "support-bundle": "Collect what a bug report needs, without secrets.",
    "etcd-auth": "Let only controlds and operators into etcd.",
    "nats-config": "Print a configuration of nats-server: who may say and hear what.",
}


class Verbs(click.Group):
    """Finds a verb in agentctl.verbs when it is asked for: no verb pays for another's imports."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = import_module(
            f"agentctl.verbs.{cmd_name.replace('-', '_')}"
        ).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=Verbs, help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="corefleet", prog_name="agentctl")
def main() -> None:
    """The command line's root."""
