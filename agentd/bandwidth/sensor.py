"""What a source of bandwidth figures is, and what it says of a domain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from agentd.bandwidth.report import Source


@dataclass(slots=True, frozen=True)
class Load:
    """One domain since the sample before. None: this source does not say."""

    bytes_per_s: float | None = None
    batch_bytes_per_s: float | None = None
    latency_ratio: float | None = None


class Sensor(Protocol):
    """One source. Used by one thread; `close` is idempotent."""

    @property
    def source(self) -> Source: ...

    def available(self) -> str | None:
        """Make ready; return None, or a line that says why this cannot be used here."""
        ...

    def sample(self, now: float) -> Mapping[int, Load]:
        """Return each domain's load since the last call; a domain without figures is absent.

        `now` is monotonic, in seconds. Raises Unavailable if the source went away.
        """
        ...

    def close(self) -> None: ...
