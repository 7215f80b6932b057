"""agentctl brings the token of a file, never one of its command line, and says who it is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from google.rpc import code_pb2

from agentctl.main import main
from agentctl.options import read_token
from corefleet.client import Client
from corefleet.errors import InvalidInput
from corefleet.rpc import access_pb2, access_pb2_grpc

Brought = list[str]


class Access(access_pb2_grpc.AccessServicer):
    """Says of a token `t-<name>` that it is <name>'s."""

    def __init__(self) -> None:
        self.brought: Brought = []

    def WhoAmI(self, request: access_pb2.WhoAmIRequest, context: Any) -> Any:  # noqa: N802
        brought = dict(context.invocation_metadata()).get("authorization", "")
        self.brought.append(brought)
        if brought == "Bearer t-nobody":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "token: it has expired")
        name = brought.removeprefix("Bearer t-")
        right = access_pb2.Right(verbs=["read"], pools=["p*"], tenants=["*"])
        return access_pb2.WhoAmIReply(
            name=f"subject:{name}", subject=name, identity="client/gate", groups=["ml"],
            expires_ms=1_800_000_000_000, rights=[right] if name != "poor" else [],
        )  # fmt: skip


@pytest.fixture
def access() -> Iterator[tuple[Access, str]]:
    """Return a server's servicer and its address; the command line has a loop of its own."""
    from concurrent.futures import ThreadPoolExecutor

    servicer = Access()
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        access_pb2_grpc.add_AccessServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield servicer, f"127.0.0.1:{port}"
        server.stop(None).wait()


def token_file(tmp_path: Path, text: str, mode: int = 0o640) -> str:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_whoami_tells_name_rights_and_until_when(
    access: tuple[Access, str], tmp_path: Path
) -> None:
    servicer, address = access
    arguments = ["whoami", "--address", address, "--token-file", token_file(tmp_path, "t-bob\n")]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 0, ran.output
    assert ran.stdout.splitlines()[0] == "subject:bob"
    for part in ("read", "p*"):
        assert part in ran.stdout
    for part in ("groups: ml", "client/gate", "2027-01-15 08:00:00 UTC"):
        assert part in ran.stderr
    assert servicer.brought == ["Bearer t-bob"]
    shown = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    assert (shown["name"], shown["rights"][0]["verbs"]) == ("subject:bob", ["read"])


def test_the_environment_names_the_file_too(
    access: tuple[Access, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servicer, address = access
    monkeypatch.setenv("COREFLEET_TOKEN_FILE", token_file(tmp_path, "t-poor"))
    ran = CliRunner().invoke(main, ["whoami", "--address", address])
    assert ran.exit_code == 0, ran.output
    assert "may do nothing here" in ran.stderr
    monkeypatch.delenv("COREFLEET_TOKEN_FILE")
    CliRunner().invoke(main, ["whoami", "--address", address])
    assert servicer.brought == ["Bearer t-poor", ""]


def test_who_is_not_known_has_an_exit_code_of_its_own(
    access: tuple[Access, str], tmp_path: Path
) -> None:
    path = token_file(tmp_path, "t-nobody")
    ran = CliRunner().invoke(main, ["whoami", "--address", access[1], "--token-file", path])
    assert ran.exit_code == 5
    assert "it has expired" in ran.stderr
    assert "t-nobody" not in ran.output


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("t-bob", 0o644, "not everybody can read"),
        ("", 0o600, "one token"),
        ("two tokens", 0o600, "one token"),
        ("x" * 20_000, 0o600, "one token"),
        ("t-bäb", 0o600, "one token"),
    ],
)
def test_a_token_file_that_is_not_right_is_refused_without_showing_it(
    tmp_path: Path, text: str, mode: int, expected: str
) -> None:
    ran = CliRunner().invoke(
        main,
        ["nodes", "--address", "127.0.0.1:1", "--token-file", token_file(tmp_path, text, mode)],
    )
    assert ran.exit_code == 2
    assert expected in ran.stderr
    assert not text or text not in ran.output


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        read_token(tmp_path / "none")


def test_the_token_is_read_anew_for_each_call(access: tuple[Access, str]) -> None:
    servicer, address = access
    tokens = iter(["t-one", "t-two"])

    async def twice() -> list[str]:
        async with Client(address, token=lambda: next(tokens)) as client:
            return [(await client.whoami()).name for _ in range(2)]

    assert in_a_thread(twice) == ["subject:one", "subject:two"]
    assert servicer.brought == ["Bearer t-one", "Bearer t-two"]


def in_a_thread(work: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(asyncio.run(work())))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1:7070", True),
        ("127.8.9.1:7070", True),
        ("[::1]:7070", True),
        ("localhost:7070", True),
        ("10.0.0.1:7070", False),
        ("[fd00::1]:7070", False),
        ("localhost.example:7070", False),
        ("controld:7070", False),
    ],
)
def test_a_token_never_goes_over_a_network_in_plain_text(address: str, allowed: bool) -> None:
    async def make() -> None:
        async with Client(["127.0.0.1:1", address], token=lambda: "t"):
            pass

    if allowed:
        asyncio.run(make())
    else:
        with pytest.raises(InvalidInput, match="tokens need TLS"):
            asyncio.run(make())


def test_codes_of_denials_are_those_of_grpc() -> None:
    assert (code_pb2.UNAUTHENTICATED, code_pb2.PERMISSION_DENIED) == (16, 7)
