"""Specs beside units: whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentd.launch.kept import KeptSpecs
from agentd.launch.protocol import LaunchSpec
from corefleet.errors import CorruptRecord

SPEC = LaunchSpec(
    name="it", command=("a", "é"), cpus=(1, 2), domain=0, environment={"A": "b"}, log=Path("/x/y")
)


def test_a_spec_comes_back_as_it_was(tmp_path: Path) -> None:
    kept = KeptSpecs(tmp_path / "units")
    assert kept.units() == ()
    kept.keep("u-\\x2f.service", SPEC)
    assert kept.units() == ("u-\\x2f.service",)
    assert kept.read("u-\\x2f.service") == SPEC
    kept.forget("u-\\x2f.service")
    kept.forget("u-\\x2f.service")
    assert kept.units() == ()


def test_what_was_never_finished_is_removed(tmp_path: Path) -> None:
    (tmp_path / "u.service.part").write_text('{"name"')
    assert KeptSpecs(tmp_path).units() == ()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{}", '{"name": 1}', "\xff"])
def test_what_cannot_be_read_says_which_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "u.service.json").write_text(text, "latin-1")
    with pytest.raises(CorruptRecord, match=r"u\.service\.json"):
        KeptSpecs(tmp_path).read("u.service")
