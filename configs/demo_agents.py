"""Two agents in Python."""

from __future__ import annotations

import asyncio

from corefleet.agent import Agent, Turn


class Echo(Agent):
    """Answers with its input: no model, no steps."""

    async def run(self, turn: Turn) -> str:
        return turn.input


class Research(Agent):
    """Looks at a question from several sides at the same time, then sums up."""

    SIDES = ("benefits", "risks")

    async def run(self, turn: Turn) -> str:
        number = await turn.recall("questions", 0) + 1
        date, *notes = await asyncio.gather(
            turn.call("utc_clock"),
            *(
                turn.infer(f"In two sentences, name the {side} of: {turn.input}")
                for side in self.SIDES
            ),
        )
        await turn.publish(
            "notes", {side: n.text for side, n in zip(self.SIDES, notes, strict=True)}
        )
        material = "\n".join(note.text for note in notes)
        summary = await turn.infer(f"Sum up in three sentences.\n\n{material}")
        await turn.remember("questions", number)
        return f"Question {number}, {date}: {summary.text}"
