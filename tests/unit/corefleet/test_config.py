"""A wrong configuration file is an error that names file, key and what would be right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corefleet import config
from corefleet.config import AgentdConfig, ControldConfig, EngineConfig
from corefleet.errors import ConfigError
from corefleet.paths import cache_dir

ROOT = Path(__file__).resolve().parents[3]
NODE = 'node_id = "n1"\ndata_dir = "/tmp/n1"\n'


def test_defaults_fill_what_is_not_said(tmp_path: Path) -> None:
    file = tmp_path / "agentd.toml"
    file.write_text(NODE + "[engine]\nmax_sequences = 4\n")

    read = config.load(file, AgentdConfig)

    assert read == AgentdConfig(
        node_id="n1", data_dir="/tmp/n1", engine=EngineConfig(max_sequences=4)
    )


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (NODE + 'nodeid = "n2"', r"`nodeid`: unknown key; did you mean `node_id`\?"),
        (NODE + "zzz = 1", r"`zzz`: unknown key; known: node_id, rack, "),
        (NODE + "[engine]\nmax_sequence = 4", r"`engine.max_sequence`: .*`max_sequences`\?"),
        (NODE + "[log]\nlevel = 'loud'", r"`log.level`: Invalid enum value 'loud'"),
        (NODE + "[engine]\nmax_sequences = 'many'", r"`engine.max_sequences`: Expected `int`"),
        (NODE + "domains = [0, 'one']", r"`domains\[1\]`: Expected `int`, got `str`"),
        ('node_id = "n1"', r"missing required field `data_dir`"),
        ("node_id = ", r"not TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "agentd.toml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=complaint) as caught:
        config.load(file, AgentdConfig)

    assert str(caught.value).startswith(f"{file}: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.toml: no such file"):
        config.load(tmp_path / "none.toml", ControldConfig)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    file = tmp_path / "controld.toml"
    file.write_bytes(b'id = "\xff"')

    with pytest.raises(ConfigError, match=r"controld.toml: not readable"):
        config.load(file, ControldConfig)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[support]\nslots = 0\nmodel = 'm'", r"`support.slots`: 0; expected 1 or more"),
        ("[support]\nagent = 'Support'", r"`support.agent`: 'Support'; expected `declared` or"),
        ("[support]\nprompt = 'x'", r"`support.model`: missing; a declared agent needs a model"),
        (
            "[support]\nmodel = 'm'\ntools = [{name = 'pay', source = 'pay'}]",
            r"`support.tools`: pay: source 'pay'; expected `builtin` or `module:function`",
        ),
        ("[support]\nmodel = 'm'\nname = 'help'", r"`support.name`: 'help'; expected 'support'"),
        ("[support]\nmodel = 'm'\nslot = 1", r"`support.slot`: unknown key; did you mean `slots`"),
        ("[support]\nmodel = 'm'\nmax_steps = 1.5", r"`support.max_steps`: Expected `int`"),
        ("support = 1", r"`support`: expected a table \[support\]"),
    ],
)
def test_mistakes_in_pools_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "pools.toml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=complaint) as caught:
        config.load_pools(file)

    assert str(caught.value).startswith(f"{file}: ")


def test_pools_are_named_by_their_tables(tmp_path: Path) -> None:
    file = tmp_path / "pools.toml"
    file.write_text("[a]\nmodel = 'm'\n[b]\nagent = 'shop:Agent'\nslots = 2\n")

    first, second = config.load_pools(file)

    assert (first.name, first.model) == ("a", "m")
    assert (second.name, second.agent, second.slots) == ("b", "shop:Agent", 2)


def test_the_models_that_come_with_it_are_well_named() -> None:
    models = config.load_models(ROOT / "configs" / "models.toml")

    assert {"qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"} <= set(models)
    for model in models.values():
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.size_bytes > 0
        assert [source.kind for source in model.sources] == ["path", "hub", "packages"]
        for requirement in model.sources[2].packages:
            name, digest = requirement.split(" --hash=sha256:")
            assert "==" in name
            assert len(bytes.fromhex(digest)) == 32


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"COREFLEET_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, "/c"),
        ({"COREFLEET_CACHE": "", "XDG_CACHE_HOME": "/x"}, "/x/corefleet"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/corefleet"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("COREFLEET_CACHE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    assert cache_dir() == Path(expected)


def test_stderr_is_the_journal_only_if_the_journal_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = os.fstat(2)

    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    assert config.under_journal()
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino + 1}")
    assert not config.under_journal()
    monkeypatch.delenv("JOURNAL_STREAM")
    assert not config.under_journal()
