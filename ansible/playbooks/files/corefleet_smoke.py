"""The agent of the smoke task."""

from __future__ import annotations

import os

from corefleet.agent import Agent, Turn


class Smoke(Agent):
    """Says where it runs."""

    async def run(self, turn: Turn) -> str:
        return f"corefleet works on {os.uname().nodename}: {turn.input}"
