"""Files of keys: modes whatever the umask, and a pair that fits whenever the machine stops."""

from __future__ import annotations

import grp
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from corefleet.errors import InvalidInput
from corefleet.identity import Identity
from corefleet.pki import CertificateAuthority, Issued, files
from corefleet.pki.holding import has_fitting_key, read_facts
from corefleet.pki.reading import load_key

ME = Identity("agentd", "n1")


class Stopped(BaseException):
    """The machine stopped here."""


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[Issued, Issued, Issued]:
    ca = CertificateAuthority.create(tmp_path / "ca")
    return ca.issue(ME), ca.issue(ME), ca.issue(ME)


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def put(directory: Path, pair: Issued, gid: int | None = None) -> None:
    files.write_pair(directory, "agentd", pair.cert_pem, pair.key_pem, gid)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def stop_at(patch: pytest.MonkeyPatch, function: str, call: int) -> list[int]:
    """Let the machine stop at a call of `os.<function>`: nothing is tidied up afterwards."""
    real, calls = getattr(os, function), [0]

    def faulty(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            patch.setattr(os, "unlink", lambda *_, **__: None)
            raise Stopped
        return real(*args, **kwargs)

    patch.setattr(os, function, faulty)
    return calls


@pytest.mark.parametrize("before", ["nothing", "a pair", "plain files"])
@pytest.mark.parametrize("function", ["replace", "symlink", "fsync", "mkdir", "chmod"])
def test_key_and_certificate_fit_wherever_the_machine_stops(
    tmp_path: Path,
    pairs: tuple[Issued, Issued, Issued],
    monkeypatch: pytest.MonkeyPatch,
    before: str,
    function: str,
) -> None:
    old, new, last = pairs
    for call in range(1, 20):
        directory = tmp_path / str(call)
        directory.mkdir()
        if before == "a pair":
            put(directory, old)
        elif before == "plain files":
            (directory / "agentd.pem").write_bytes(old.cert_pem)
            (directory / "agentd.key").write_bytes(old.key_pem)
        with monkeypatch.context() as broken:
            calls = stop_at(broken, function, call)
            try:
                put(directory, new)
                stopped = False
            except Stopped:
                stopped = True
        held = read_facts(directory, "agentd")
        if held is not None and (directory / "agentd.key").exists():
            assert has_fitting_key(directory, "agentd", held)
            assert held.serial in (old.serial, new.serial)
        else:
            assert stopped
            assert before != "a pair", "a good pair is gone"
        put(directory, last)
        held = read_facts(directory, "agentd")
        assert held is not None
        assert held.serial == last.serial
        assert has_fitting_key(directory, "agentd", held)
        left = {path.name for path in directory.iterdir()} - {os.readlink(directory / ".agentd")}
        assert left == {".agentd", "agentd.pem", "agentd.key"}
        if not stopped:
            assert calls[0] < call
            return
    pytest.fail(f"os.{function} is called again and again")


@pytest.mark.parametrize("call", [1, 2])
def test_a_file_is_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    path = tmp_path / "state"
    files.write(path, b"old", files.SECRET)
    with monkeypatch.context() as broken:
        stop_at(broken, "fsync", call)
        with pytest.raises(Stopped):
            files.write(path, b"new", files.SECRET)
    assert path.read_bytes() == (b"old", b"new")[call - 1]


@pytest.mark.usefixtures("umask")
def test_a_key_is_its_owners_only_whatever_the_umask(
    tmp_path: Path, pairs: tuple[Issued, Issued, Issued]
) -> None:
    put(tmp_path / "d", pairs[0])
    assert mode(tmp_path / "d/agentd.key") == 0o600
    assert mode(tmp_path / "d/agentd.pem") == 0o644
    assert mode((tmp_path / "d/agentd.pem").resolve().parent) == 0o755


def test_a_service_s_group_may_read_its_key(
    tmp_path: Path, pairs: tuple[Issued, Issued, Issued]
) -> None:
    gid = files.group_id(grp.getgrgid(os.getgid()).gr_name)
    put(tmp_path, pairs[0], gid)
    assert mode(tmp_path / "agentd.key") == 0o640
    assert (tmp_path / "agentd.key").stat().st_gid == gid


def test_an_unknown_group_is_named() -> None:
    with pytest.raises(InvalidInput, match="no-such-group"):
        files.group_id("no-such-group")


@pytest.mark.usefixtures("umask")
def test_no_secret_of_a_ca_is_ever_open_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for a moment either: a file is made with the mode that it keeps, or a narrower one."""
    opened: list[tuple[str, int]] = []
    real = os.open

    def watched(path: Any, flags: int, mode: int = 0o777, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            opened.append((str(path), mode))
        return real(path, flags, mode, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    ca = CertificateAuthority.create(tmp_path / "ca")
    ca.issue(ME)
    for step in ("begin", "switch", "finish"):
        ca.rotate(step, force=True)
    assert len(opened) > 5
    assert [path for path, mode in opened if mode & 0o077] == []
    for file in (tmp_path / "ca").rglob("*"):
        if file.is_file() and b"PRIVATE" in file.read_bytes():
            assert mode(file) == 0o600, file
    assert mode(tmp_path / "ca") == mode(tmp_path / "ca/cas") == 0o700


def test_a_ca_whose_key_others_can_read_signs_nothing(tmp_path: Path) -> None:
    ca = CertificateAuthority.create(tmp_path / "ca")
    [key] = (tmp_path / "ca/cas").glob("*.key")
    key.chmod(0o640)
    with pytest.raises(InvalidInput, match="mode 0600"):
        ca.issue(ME)
    key.chmod(0o600)
    ca.issue(ME)


def test_a_ca_is_not_made_where_others_can_change_it(tmp_path: Path) -> None:
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca").chmod(0o777)
    with pytest.raises(InvalidInput, match="only its owner"):
        CertificateAuthority.create(tmp_path / "ca")
    assert list((tmp_path / "ca").iterdir()) == []


def test_a_link_that_somebody_planted_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "key").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "key", b"secret", files.SECRET)
    files.write(tmp_path / "key", b"secret", files.SECRET)
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "key").is_symlink()


def test_an_error_about_a_key_does_not_show_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as raised:
        load_key(b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n", tmp_path)
    assert "c2VjcmV0" not in str(raised.value)
    assert str(tmp_path) in str(raised.value)
