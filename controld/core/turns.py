"""Turns at a pool's places: the shards of one controld take them in the order they asked."""

from __future__ import annotations

from controld.core.eligibility import Offers


class _Line:
    """Shards in line for one pool."""

    __slots__ = ("granted", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[int, None] = {}
        self.granted: set[int] = set()


class Turns:
    """Who may take a place next. `offers` is the fleet's table, shared."""

    def __init__(self, offers: dict[str, Offers]) -> None:
        self._offers = offers
        self._lines: dict[str, _Line] = {}
        self._wake: set[str] = set()

    def turn(self, pool: str, shard: int) -> bool:
        """Return whether `shard` may take a place of `pool`; if not, it stands in line."""
        line = self._lines.get(pool)
        if line is None:
            return True
        if shard in line.granted:
            line.granted.discard(shard)
            return True
        if not line.waiting:
            return True
        if next(iter(line.waiting)) == shard:
            del line.waiting[shard]
            return True
        self.wait(pool, shard)
        return False

    def wait(self, pool: str, shard: int) -> None:
        """Let `shard` stand in line for a place of `pool`."""
        line = self._lines.get(pool)
        if line is None:
            line = self._lines[pool] = _Line()
        line.waiting.setdefault(shard)
        self.opened(pool)

    def opened(self, pool: str) -> None:
        """A place may be free: whoever stands in line is to be woken."""
        line = self._lines.get(pool)
        if line is not None and line.waiting:
            self._wake.add(pool)

    def woken(self) -> list[int]:
        """Return the shards whose turn it is, each once; empty when nobody can go on."""
        if not self._wake:
            return []
        shards: dict[int, None] = {}
        for pool in tuple(self._wake):
            line = self._lines[pool]
            offers = self._offers.get(pool)
            if offers is not None and offers.count and line.waiting:
                shard = next(iter(line.waiting))
                del line.waiting[shard]
                line.granted.add(shard)
                shards[shard] = None
            else:
                self._wake.discard(pool)
        return list(shards)

    def forget_shard(self, shard: int) -> None:
        """The shard is no longer ours: it stands in no line."""
        for line in self._lines.values():
            line.waiting.pop(shard, None)
            line.granted.discard(shard)
