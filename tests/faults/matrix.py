"""The failure matrix of docs/architecture.md as it was measured; printed when tests end."""

from __future__ import annotations

from dataclasses import dataclass, field

GOALS = {
    "worker": "0.3 s",
    "agentd alone": "as a node (plain launcher)",
    "node": "p50 0.8 s, p99 1.5 s",
    "rack": "3 s",
    "no progress": "at once after progress_timeout_s",
    "controld": "3 s for its shards",
    "etcd": "tasks keep flowing",
    "NATS server": "core traffic 1 s; writes wait for a leader",
    "frozen, then awake": "no effect",
    "client": "its tasks go on; resubmitting changes nothing",
    "slow network": "work goes on",
}
NOT_HERE = {
    "engine": "0.5 s + mapping: python -m tools.bench takeover",
    "clock step": "a namespace has no wall clock of its own: not tested here",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One fault. `seconds` are the times until each piece of work went on."""

    row: str
    fault: str
    seconds: tuple[float, ...]
    note: str = ""


@dataclass(slots=True)
class Matrix:
    """All that this run measured."""

    rows: list[Measured] = field(default_factory=list)

    def add(self, row: str, fault: str, seconds: list[float], note: str = "") -> None:
        assert row in GOALS, row
        self.rows.append(Measured(row, fault, tuple(sorted(seconds)), note))

    def lines(self) -> list[str]:
        """Return the table, one line a fault, in the order of the matrix."""
        if not self.rows:
            return []
        lines = [
            f"{'what':<19} {'fault':<41} {'median':>7} {'longest':>7} {'n':>3}  of what",
        ]
        for row, goal in GOALS.items():
            rows = [each for each in self.rows if each.row == row]
            if rows:
                lines.append(f"{row:<19} goal: {goal}")
            for found in rows:
                median = found.seconds[len(found.seconds) // 2] if found.seconds else None
                longest = found.seconds[-1] if found.seconds else None
                lines.append(
                    f"{'':<19} {found.fault:<41} {_shown(median):>7} {_shown(longest):>7} "
                    f"{len(found.seconds):>3}  {found.note}"
                )
        lines += [f"{what:<19} {why}" for what, why in NOT_HERE.items()]
        return lines


def _shown(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"


MATRIX = Matrix()
