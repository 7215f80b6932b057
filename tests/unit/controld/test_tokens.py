"""Tokens are taken when everything about them is right, and refused with the reason otherwise."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from controld.app import main
from controld.token_keys import KeyFile, parse_keys
from controld.tokens import Bearer, Verifier
from corefleet.config import TokenConfig
from corefleet.errors import ConfigError, Unauthenticated
from tests.unit.controld.token_issuer import ISSUER, Issuer, write_jwks

CONFIG = TokenConfig(keys="keys.json", issuer=ISSUER)
ES = Issuer("ES256")


def jwks(*issuers: Issuer) -> bytes:
    return json.dumps({"keys": [each.jwk() for each in issuers]}).encode()


def bearer(token: str, data: bytes | None = None, config: TokenConfig = CONFIG) -> Bearer:
    keys = parse_keys(jwks(ES) if data is None else data, "keys.json")
    return Verifier(config).bearer(token, keys, time.time())


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
@pytest.mark.parametrize("form", ["jwks", "pem"])
def test_a_good_token_names_its_subject_and_groups(algorithm: str, form: str) -> None:
    issuer = Issuer(algorithm)
    token = issuer.token("bob@example.org", groups=["ml", "all"])
    found = bearer(token, jwks(issuer) if form == "jwks" else issuer.pem())
    assert (found.subject, found.groups) == ("bob@example.org", ("ml", "all"))
    assert 3600 <= found.until_s - time.time() <= 3611


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": int(time.time()) - 60}, "has expired"),
        ({"exp": None}, "lacks one of the claims"),
        # Long after any run of all tests, which begins when this list is made.
        ({"nbf": int(time.time()) + 10**8}, "not valid yet"),
        ({"aud": "others"}, "another audience; expected 'corefleet'"),
        ({"aud": None}, "lacks one of the claims"),
        ({"iss": "https://evil.example"}, f"another issuer; expected '{ISSUER}'"),
        ({"iss": None}, "lacks one of the claims"),
        ({"sub": None}, "claim sub"),
        ({"sub": ""}, "claim sub"),
        ({"sub": "bob\nwho=root"}, "claim sub"),
        ({"sub": "b" * 300}, "claim sub"),
        ({"exp": float("inf")}, "not as they should be"),
        ({"exp": float("nan")}, "not as they should be"),
        ({"groups": [1]}, "claim groups"),
        ({"groups": {"a": "b"}}, "claim groups"),
        ({"groups": ["g"] * 300}, "claim groups"),
    ],
)
def test_a_wrong_claim_is_named(claims: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unauthenticated, match=reason):
        bearer(ES.token(**claims))


def test_a_token_for_ever_is_good_for_as_long_as_there_are_dates() -> None:
    assert bearer(ES.token(exp=10**300)).until_s < 10**12


def test_a_clock_that_is_a_little_off_is_forgiven() -> None:
    assert bearer(ES.token(exp=int(time.time()) - 5)).subject == "bob"
    with pytest.raises(Unauthenticated, match="expired"):
        bearer(
            ES.token(exp=int(time.time()) - 5),
            config=TokenConfig(keys="k", issuer=ISSUER, leeway_s=1.0),
        )


def test_claims_can_have_other_names() -> None:
    config = TokenConfig(keys="k", issuer=ISSUER, subject_claim="email", groups_claim="roles")
    found = bearer(ES.token(email="bob@x", roles="one", groups=["other"]), config=config)
    assert (found.subject, found.groups) == ("bob@x", ("one",))


def unsigned(header: dict[str, str]) -> str:
    claims = {"iss": ISSUER, "aud": "corefleet", "sub": "root", "exp": int(time.time()) + 60}
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()) for part in (header, claims)]
    return b".".join([part.rstrip(b"=") for part in parts] + [b""]).decode()


@pytest.mark.parametrize("alg", ["none", "None", "HS256", "HS512", "RS384", "PS256", ""])
def test_only_three_asymmetric_algorithms_are_taken(alg: str) -> None:
    with pytest.raises(Unauthenticated, match="alg"):
        bearer(unsigned({"alg": alg, "typ": "JWT", "kid": "k1"}))


def test_a_public_key_is_no_secret_to_sign_with() -> None:
    issuer = Issuer("RS256")
    claims = {"iss": ISSUER, "aud": "corefleet", "sub": "root", "exp": int(time.time()) + 60}
    # The library refuses to make such a token from PEM; its bytes as they stand it takes.
    secret = base64.b64encode(issuer.pem())
    forged = jwt.encode(claims, secret, "HS256", headers={"kid": "k1"})
    with pytest.raises(Unauthenticated, match="alg 'HS256'"):
        bearer(forged, issuer.pem())


def test_the_signature_must_be_that_of_the_named_key() -> None:
    other = Issuer("ES256", "k1")
    with pytest.raises(Unauthenticated, match="signature"):
        bearer(other.token())
    good = ES.token()
    head, body, signature = good.split(".")
    flipped = ("A" if signature[0] != "A" else "B") + signature[1:]
    with pytest.raises(Unauthenticated, match="signature"):
        bearer(f"{head}.{body}.{flipped}")


def test_an_unknown_kid_and_a_key_of_another_algorithm_are_refused() -> None:
    with pytest.raises(Unauthenticated, match="no key here has the kid 'k9'"):
        bearer(Issuer("ES256", "k9").token())
    rsa_issuer = Issuer("RS256", "k1")
    with pytest.raises(Unauthenticated, match="and is for RS256"):
        bearer(rsa_issuer.token())


def test_a_token_without_kid_is_taken_when_there_is_one_key_only() -> None:
    assert bearer(ES.token(headers={})).subject == "bob"
    with pytest.raises(Unauthenticated, match="kid None"):
        bearer(ES.token(headers={}), jwks(ES, Issuer("ES256", "k2")))


def test_keys_of_a_pem_file_are_tried_in_turn() -> None:
    second = Issuer("ES256", "whatever")
    assert bearer(second.token(), ES.pem() + second.pem()).subject == "bob"


@pytest.mark.parametrize("token", ["", "a", "a.b.c", "é.é.é", "..", "e30.e30.e30", "x" * 20_000])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(Unauthenticated, match=r"^token: ") as raised:
        bearer(token)
    if len(token) > 3:
        assert token not in str(raised.value)


def test_what_was_verified_is_looked_up_until_it_expires_or_the_keys_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoded: list[str] = []
    real = jwt.decode

    def decode(token: str, *args: Any, **kwargs: Any) -> Any:
        decoded.append(token)
        return real(token, *args, **kwargs)

    monkeypatch.setattr(jwt, "decode", decode)
    verifier, keys, now = Verifier(CONFIG), parse_keys(jwks(ES), "k"), time.time()
    token = ES.token(exp=int(now) - 5)
    for _ in range(3):
        assert verifier.bearer(token, keys, now).subject == "bob"
    assert len(decoded) == 1
    verifier.bearer(token, keys, now + 6)
    assert len(decoded) == 2
    with pytest.raises(Unauthenticated):
        verifier.bearer(token, parse_keys(jwks(Issuer("ES256", "k2")), "k"), now)


def private_pem() -> bytes:
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a JWKS"),
        (b"[]", "not a JWKS"),
        (b'{"keys": []}', "no usable key"),
        (b'{"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "a"}]}', "secret or private key"),
        (b'{"keys": [{"kty": "EC", "d": "x"}]}', "secret or private key"),
        (b'{"keys": [{"kty": "EC", "crv": "P-256", "x": "?", "y": "?"}]}', "no usable key"),
        (private_pem(), "private key"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "not a public key"),
        (b"-----BEGIN CERTIFICATE-----\n", "no usable key"),
        (jwks(ES, Issuer("ES256", "k1")), "same kid"),
        (Issuer("RS256", key=rsa.generate_private_key(65537, 1024)).pem(), "another kind"),
    ],
)
def test_a_file_that_cannot_verify_anything_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_keys(data, "keys.json")


def test_keys_for_something_else_are_left_out() -> None:
    told = [ES.jwk(), Issuer("ES256", "e").jwk(use="enc"), Issuer("RS256", "r").jwk(alg="RS512")]
    keys = parse_keys(json.dumps({"keys": told}).encode(), "k")
    assert [key.kid for key in keys] == ["k1"]


async def test_a_changed_file_is_read_and_a_broken_one_leaves_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    old, new = Issuer("ES256", "old"), Issuer("ES256", "new")
    file = KeyFile(write_jwks(path, old).keys)
    await file.load()
    first = file.keys
    await file.look()
    assert file.keys is first, "the same file is not read twice"

    write_jwks(path, old, new)
    await file.look()
    assert [key.kid for key in file.keys] == ["old", "new"]

    path.write_text("not keys at all")
    await file.look()
    path.unlink()
    await file.look()
    assert [key.kid for key in file.keys] == ["old", "new"]

    replacement = tmp_path / "new.json"
    write_jwks(replacement, new)
    os.replace(replacement, path)
    await file.look()
    assert [key.kid for key in file.keys] == ["new"]


async def test_keys_that_are_not_there_at_the_start_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        await KeyFile(str(tmp_path / "none.json")).load()


@pytest.mark.parametrize(("good", "code"), [(True, 0), (False, 2)])
def test_the_check_of_a_configuration_reads_the_keys(tmp_path: Path, good: bool, code: int) -> None:
    config = write_jwks(tmp_path / "keys.json", ES)
    if not good:
        Path(config.keys).write_bytes(private_pem())
    path = tmp_path / "controld.toml"
    path.write_text(
        f'id = "c1"\ninsecure = true\n[auth.tokens]\nkeys = "{config.keys}"\nissuer = "{ISSUER}"\n'
    )
    ran = CliRunner().invoke(main, ["--config", str(path), "--check-config"])
    assert ran.exit_code == code
    assert good or "holds a private key" in ran.stderr
