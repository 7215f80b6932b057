"""Uninstalling: what outlives agentd is found and removed."""

from __future__ import annotations

from pathlib import Path

from agentd.release import release
from tests.unit.agentd.machines import write_tree


async def test_only_our_groups_of_resctrl_are_removed_and_what_stays_is_told(
    tmp_path: Path,
) -> None:
    host = write_tree(tmp_path, {"sys/fs/resctrl/corefleet-online/held": "by a file"})
    for name in ("corefleet-batch", "theirs", "info"):
        (tmp_path / "sys/fs/resctrl" / name).mkdir()
    left = await release(host)
    assert left == ["resctrl group corefleet-online: Directory not empty"]
    assert host.names("sys/fs/resctrl") == ["corefleet-online", "info", "theirs"]
