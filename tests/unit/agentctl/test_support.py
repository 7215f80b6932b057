"""A support bundle tells no secrets, and says what it lacks."""

from __future__ import annotations

import json
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentctl.support import bundle as bundling
from agentctl.support.bundle import Bundle, collect, of_configuration, of_system
from agentctl.support.redaction import MARK, redact
from corefleet.errors import Unavailable

SECRET = "hunter2-Zq8xV"
JWT = "eyJhbGciOiJFUzI1NiJ9.eyJzdWIiOiJhbm5hIn0.c2lnbmF0dXJlLWhlcmU"
KEY = "-----BEGIN EC PRIVATE KEY-----\nMHcCAQEEIJhunter2\nabc\n-----END EC PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        f'password = "{SECRET}"',
        f"nats_password: {SECRET}, next: 1",
        f'{{"api_key": "{SECRET}", "n": 1}}',
        f"AWS_SECRET_ACCESS_KEY={SECRET} cmd",
        f"servers = ['nats://user:{SECRET}@nats-1:4222']",
        f"Authorization: Bearer {SECRET}AAAA",
        f"--auth-token '{SECRET}'",
        f"Cookie: {SECRET}",
        f"said {JWT.replace('anna', SECRET)} to us, {SECRET.replace(SECRET, '')}",
        f"x\n{KEY.replace('hunter2', SECRET)}\ny",
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
    ],
)
def test_secrets_are_gone(text: str) -> None:
    cleaned = redact(text)
    assert SECRET not in cleaned
    assert MARK in cleaned
    assert redact(cleaned) == cleaned


@pytest.mark.parametrize(
    "text",
    [
        'node_id = "node-0001"',
        "tokens_out=42 tokens_in=7",
        'token_file = "/etc/corefleet/token"',
        "batch_tokens = 512",
        'key = "/etc/corefleet/pki/agentd.key"',
        "prefill_chunk_tokens = 256",
        "nats://nats-1:4222",
        "step 3 infer on n1 (0.20 s, 40 tokens)",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@given(st.text(alphabet=st.characters(codec="ascii"), max_size=200))
def test_redaction_is_stable_on_any_text(text: str) -> None:
    cleaned = redact(text)
    assert redact(cleaned) == cleaned


@given(st.text(alphabet="abcXYZ0189_-.+/", min_size=8, max_size=40))
def test_no_value_of_a_password_survives(value: str) -> None:
    assert value not in redact(f'db.password = "{value}"').replace(MARK, "")


def test_the_archive_is_for_its_owner_and_says_what_is_missing(tmp_path: Path) -> None:
    made = Bundle()
    made.add("config/agentd.toml", f'password = "{SECRET}"\n')
    made.lacks("fleet/nodes.json", f"no answer from nats://u:{SECRET}@n1")
    path = tmp_path / "it.tar.gz"
    made.write(path, 1_700_000_000)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SECRET.encode() not in path.read_bytes()
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["it/config/agentd.toml", "it/manifest.json"]
        raw = archive.extractfile("it/manifest.json")
        assert raw is not None
        manifest = json.load(raw)
    assert manifest["files"] == ["config/agentd.toml"]
    assert SECRET not in manifest["missing"]["fleet/nodes.json"]


def test_an_archive_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "it.tar.gz"
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        Bundle().write(path, 0)
    assert path.read_text() == "mine"


def test_of_a_long_file_the_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundling, "_MOST_BYTES", 4)
    made = Bundle()
    made.add("journal", "123456")
    assert made.files["journal"] == b"3456"


async def test_what_cannot_be_had_is_named() -> None:
    async def away() -> str:
        raise Unavailable("nobody there")

    made = Bundle()
    await collect(made, "fleet/nodes.json", away)
    assert made.missing == {"fleet/nodes.json": "nobody there"}
    assert not made.files


async def test_configuration_is_taken_and_keys_are_not(tmp_path: Path) -> None:
    (tmp_path / "agentd.toml").write_text('node_id = "n1"\n')
    (tmp_path / "pki").mkdir()
    (tmp_path / "pki" / "agentd.key").write_text(KEY)
    made = Bundle()
    await of_configuration(made, tmp_path)
    assert made.files == {"config/agentd.toml": b'node_id = "n1"\n'}
    assert set(made.missing) == {f"config/{name}" for name in bundling.CONFIGS} - set(made.files)


async def test_the_system_is_asked_for_each_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def said(*command: str) -> tuple[int, str]:
        if command[0] == "numactl":
            return 127, "numactl is not installed"
        return 0, f"password={SECRET} {command[-1]}"

    monkeypatch.setattr(bundling, "ask", said)
    made = Bundle()
    await of_system(made)
    assert {f"journal/{unit}.txt" for unit in bundling.UNITS} <= set(made.files)
    assert made.missing == {"system/memory.txt": "numactl is not installed"}
    assert not any(SECRET.encode() in data for data in made.files.values())
