"""The certificate authority: what it issues holds in TLS, in every pass of a rotation."""

from __future__ import annotations

import contextlib
import os
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from corefleet.errors import Conflict, CorruptRecord, Incompatible, InvalidInput, NotFound
from corefleet.identity import ROLES, Identity, Role, find_identity
from corefleet.pki import CertificateAuthority, Issued, Want
from corefleet.pki.wants import SERVERS
from tests.unit.corefleet.pki.handshakes import Peer, shake_hands

DAY_S = 86_400
SERVER = Identity("controld", "c1")
CLIENT = Identity("agentd", "n1")
HOSTS = ("c1.example.org", "127.0.0.1", "::1")


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path / "ca")


def names(cert_pem: bytes) -> x509.SubjectAlternativeName:
    cert = x509.load_pem_x509_certificate(cert_pem)
    return cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value


class Clock:
    """A clock that is so many days off."""

    def __init__(self, days: float = 0) -> None:
        self.days = days

    def __call__(self) -> float:
        return time.time() + self.days * DAY_S


def test_peers_believe_each_other_and_the_identity_is_seen(
    ca: CertificateAuthority, tmp_path: Path
) -> None:
    server = Peer(tmp_path / "s", ca.issue(SERVER, HOSTS), ca.bundle_pem)
    client = Peer(tmp_path / "c", ca.issue(CLIENT), ca.bundle_pem)
    for host in (*HOSTS, SERVER.dns_name):
        assert find_identity(shake_hands(server, client, host)) == CLIENT


def test_a_server_is_not_believed_at_another_host(ca: CertificateAuthority, tmp_path: Path) -> None:
    server = Peer(tmp_path / "s", ca.issue(SERVER, HOSTS), ca.bundle_pem)
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(server, server, "c2.example.org")


def test_certificates_of_another_ca_are_refused_by_both_ends(
    ca: CertificateAuthority, tmp_path: Path
) -> None:
    other = CertificateAuthority.create(tmp_path / "other")
    server = Peer(tmp_path / "s", ca.issue(SERVER, HOSTS), ca.bundle_pem)
    client = Peer(tmp_path / "c", other.issue(CLIENT), ca.bundle_pem)
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate.verify.failed|unknown.ca"):
        shake_hands(server, client, HOSTS[0])
    client = Peer(tmp_path / "d", ca.issue(CLIENT), other.bundle_pem)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, client, HOSTS[0])


@pytest.mark.parametrize("expired", ["server", "client"])
def test_an_expired_certificate_is_refused(tmp_path: Path, expired: str) -> None:
    clock = Clock(-30)
    ca = CertificateAuthority.create(tmp_path / "ca", clock=clock)
    old = {"server": ca.issue(SERVER, HOSTS, 29.5), "client": ca.issue(CLIENT, (), 29.5)}
    clock.days = 0
    new = {"server": ca.issue(SERVER, HOSTS), "client": ca.issue(CLIENT)}
    used = {side: (old if side == expired else new)[side] for side in new}
    server = Peer(tmp_path / "s", used["server"], ca.bundle_pem)
    client = Peer(tmp_path / "c", used["client"], ca.bundle_pem)
    with pytest.raises(ssl.SSLError, match=r"(?i)expired"):
        shake_hands(server, client, HOSTS[0])


@pytest.mark.parametrize("role", ROLES)
def test_every_role_has_its_names_and_its_purposes(ca: CertificateAuthority, role: Role) -> None:
    identity = Identity(role, "x1")
    hosts = HOSTS if role in SERVERS else ()
    cert = x509.load_pem_x509_certificate(ca.issue(identity, hosts).cert_pem)
    assert [a.value for a in cert.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == [role]
    found = names(ca.issue(identity, hosts).cert_pem)
    dns = found.get_values_for_type(x509.DNSName)
    assert dns[0] == identity.dns_name
    assert [*dns[1:], *map(str, found.get_values_for_type(x509.IPAddress))] == list(hosts)
    purposes = cert.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert ExtendedKeyUsageOID.CLIENT_AUTH in purposes
    assert (ExtendedKeyUsageOID.SERVER_AUTH in purposes) == (role in SERVERS)
    _verify(cert, ca.bundle_pem)


def _verify(cert: x509.Certificate, bundle_pem: bytes) -> None:
    store = verification.Store(x509.load_pem_x509_certificates(bundle_pem))
    builder = verification.PolicyBuilder().store(store).time(datetime.now(UTC))
    builder.build_client_verifier().verify(cert, [])


def test_a_client_cannot_serve(ca: CertificateAuthority, tmp_path: Path) -> None:
    """A stolen certificate of a client stands for no controld."""
    thief = Peer(tmp_path / "t", ca.issue(Identity("client", "web")), ca.bundle_pem)
    client = Peer(tmp_path / "c", ca.issue(CLIENT), ca.bundle_pem)
    with pytest.raises(ssl.SSLCertVerificationError, match="purpose"):
        shake_hands(thief, client, "web.client.corefleet")


def test_a_holder_of_a_certificate_is_no_ca(ca: CertificateAuthority) -> None:
    cert = x509.load_pem_x509_certificate(ca.issue(SERVER).cert_pem)
    constraints = cert.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.value.ca, constraints.critical) == (False, True)
    top = x509.load_pem_x509_certificate(ca.bundle_pem)
    own = top.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (own.value.ca, own.value.path_length, own.critical) == (True, 0, True)


def test_lives_begin_five_minutes_ago_and_serials_are_never_the_same(tmp_path: Path) -> None:
    ca = CertificateAuthority.create(tmp_path / "ca", clock=lambda: 1_800_000_000.7)
    issued = ca.issue_all([Want(Identity("agentd", f"n{k}")) for k in range(20)], 90)
    assert {each.not_before_s for each in issued} == {1_800_000_000 - 300}
    assert {each.not_after_s for each in issued} == {1_800_000_000 + 90 * DAY_S}
    assert len({each.serial for each in issued}) == 20


def test_every_key_is_a_new_one_and_is_in_no_text(ca: CertificateAuthority) -> None:
    first, second = ca.issue(SERVER), ca.issue(SERVER)
    assert first.key_pem != second.key_pem
    assert b"PRIVATE KEY" in first.key_pem
    assert "PRIVATE" not in repr(first) + str(first)


def test_peers_old_and_new_believe_each_other_in_every_pass_of_a_rotation(
    ca: CertificateAuthority, tmp_path: Path
) -> None:
    """Node rule 11. Between two passes some hosts have the newest files, others not yet."""
    made = 0

    def peers(pems: Issued, *bundles: bytes) -> list[Peer]:
        nonlocal made
        made += 1
        return [Peer(tmp_path / f"p{made}-{k}", pems, bundle) for k, bundle in enumerate(bundles)]

    old, old_bundle = ca.issue(SERVER, HOSTS), ca.bundle_pem
    assert ca.rotate("begin")
    still_old, both = ca.issue(SERVER, HOSTS), ca.bundle_pem
    _all_talk([*peers(old, old_bundle, both), *peers(still_old, old_bundle, both)])
    assert ca.rotate("switch")
    new, both_again = ca.issue(SERVER, HOSTS), ca.bundle_pem
    _all_talk([*peers(old, both, both_again), *peers(new, both, both_again)])
    assert ca.rotate("finish")
    newer, new_bundle = ca.issue(SERVER, HOSTS), ca.bundle_pem
    _all_talk([*peers(new, both, both_again, new_bundle), *peers(newer, both_again, new_bundle)])

    [left_behind], [up_to_date] = peers(old, new_bundle), peers(new, new_bundle)
    with pytest.raises(ssl.SSLError):
        shake_hands(up_to_date, left_behind, HOSTS[0])


def _all_talk(peers: list[Peer]) -> None:
    for server in peers:
        for client in peers:
            shake_hands(server, client, HOSTS[0])


def test_the_last_pass_is_refused_while_it_would_lock_a_holder_out(tmp_path: Path) -> None:
    clock = Clock()
    ca = CertificateAuthority.create(tmp_path / "ca", clock=clock)
    ca.issue_all([Want(SERVER), Want(CLIENT)])
    ca.rotate("begin")
    ca.rotate("switch")
    ca.issue(SERVER)
    with pytest.raises(Conflict, match=r"1 holders .*agentd/n1"):
        ca.rotate("finish")
    assert ca.state.phase == "switched"
    clock.days = 91
    assert ca.rotate("finish")


def test_the_last_pass_can_be_forced(ca: CertificateAuthority) -> None:
    ca.issue(SERVER)
    ca.rotate("begin")
    ca.rotate("switch")
    assert ca.rotate("finish", force=True)
    assert ca.state.trusted == (ca.state.signer,)


def test_an_interrupted_pass_is_completed_by_the_same_pass(
    ca: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "ca"
    for step in ("begin", "switch", "finish"):
        for fails_at in range(9):
            before = ca.bundle_pem
            with monkeypatch.context() as broken:
                calls = _fail(broken, fails_at)
                with contextlib.suppress(OSError):
                    ca.rotate(step)
            again = CertificateAuthority.load(directory)
            assert again.issue(SERVER).ca == again.state.signer
            assert (directory / "ca.pem").read_bytes() in (before, again.bundle_pem)
            ca = again
            if calls[0] <= fails_at:
                break
        else:
            pytest.fail(f"{step} replaces more than 8 files")
        ca.rotate(step)
        assert (directory / "ca.pem").read_bytes() == ca.bundle_pem
        kept = {file.stem for file in (directory / "cas").iterdir()}
        assert kept == set(ca.state.trusted)
    assert ca.state.phase == "steady"


def _fail(patch: pytest.MonkeyPatch, at: int) -> list[int]:
    """Let the `at`-th replacement of a file fail; returns how many were asked for."""
    replace, calls = os.replace, [0]

    def faulty(*paths: Path) -> None:
        calls[0] += 1
        if calls[0] == at + 1:
            raise OSError("the machine stopped")
        replace(*paths)

    patch.setattr(os, "replace", faulty)
    return calls


@pytest.mark.parametrize("before", [(), ("begin",), ("begin", "switch")])
def test_passes_out_of_turn_are_refused_and_the_right_one_is_named(
    ca: CertificateAuthority, before: tuple[str, ...]
) -> None:
    for step in before:
        ca.rotate(step)  # type: ignore[arg-type]
    wrong, right = {0: ("switch", "begin"), 1: ("finish", "switch"), 2: ("begin", "finish")}[
        len(before)
    ]
    with pytest.raises(Conflict, match=f"`{right}`"):
        ca.rotate(wrong)  # type: ignore[arg-type]


def test_another_process_signs_by_the_new_ca_after_a_switch(
    ca: CertificateAuthority, tmp_path: Path
) -> None:
    other = CertificateAuthority.load(tmp_path / "ca")
    old = other.issue(SERVER).ca
    ca.rotate("begin")
    ca.rotate("switch")
    assert other.issue(SERVER).ca == ca.state.signer != old


def test_a_ca_is_not_overwritten(ca: CertificateAuthority, tmp_path: Path) -> None:
    bundle = ca.bundle_pem
    with pytest.raises(Conflict, match="not overwritten"):
        CertificateAuthority.create(tmp_path / "ca")
    assert CertificateAuthority.load(tmp_path / "ca").bundle_pem == bundle


def test_a_ca_that_a_crash_left_half_made_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        _fail(broken, 2)
        with pytest.raises(OSError, match="stopped"):
            CertificateAuthority.create(tmp_path / "ca")
    with pytest.raises(NotFound):
        CertificateAuthority.load(tmp_path / "ca")
    ca = CertificateAuthority.create(tmp_path / "ca")
    assert {file.stem for file in (tmp_path / "ca/cas").iterdir()} == {ca.state.signer}


@pytest.mark.parametrize("days", [0, -1, float("nan"), 4000])
def test_impossible_lives_are_refused(ca: CertificateAuthority, days: float) -> None:
    with pytest.raises(InvalidInput, match="days"):
        ca.issue(SERVER, (), days)


def test_no_certificate_outlives_its_ca(tmp_path: Path) -> None:
    ca = CertificateAuthority.create(tmp_path / "ca", days=30)
    with pytest.raises(InvalidInput, match=r"at most 30\.0.*rotate it"):
        ca.issue(SERVER)


def test_all_are_issued_or_none(ca: CertificateAuthority) -> None:
    with pytest.raises(InvalidInput, match="name"):
        ca.issue_all([Want(SERVER), Want(Identity("agentd", "../n1"))])
    assert ca.issued == []


def test_the_index_knows_what_was_issued(ca: CertificateAuthority) -> None:
    issued = ca.issue(SERVER, HOSTS)
    [entry] = ca.issued
    assert (entry.serial, entry.role, entry.name) == (issued.serial, "controld", "c1")
    assert (entry.hosts, entry.ca, entry.not_after_s) == (HOSTS, issued.ca, issued.not_after_s)


def test_a_line_that_a_crash_left_unfinished_is_not_in_the_index(
    ca: CertificateAuthority, tmp_path: Path
) -> None:
    index = tmp_path / "ca/issued.jsonl"
    ca.issue(SERVER)
    with index.open("ab") as file:
        file.write(b'{"serial":"1')
    assert [entry.name for entry in ca.issued] == ["c1"]
    ca.issue(CLIENT)
    assert [entry.name for entry in ca.issued] == ["c1", "n1"]


def test_several_at_once_take_turns(ca: CertificateAuthority, tmp_path: Path) -> None:
    def issue(k: int) -> None:
        mine = CertificateAuthority.load(tmp_path / "ca")
        for _ in range(5):
            mine.issue_all([Want(Identity("agentd", f"n{k}")), Want(SERVER, HOSTS)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(issue, range(4)))
    assert len({entry.serial for entry in ca.issued}) == 40


def test_a_damaged_index_or_state_is_named(ca: CertificateAuthority, tmp_path: Path) -> None:
    (tmp_path / "ca/issued.jsonl").write_text("{}\n")
    with pytest.raises(CorruptRecord, match=r"issued\.jsonl, line 1"):
        _ = ca.issued
    (tmp_path / "ca/state.json").write_text("{")
    with pytest.raises(CorruptRecord, match=r"state\.json"):
        CertificateAuthority.load(tmp_path / "ca")
    (tmp_path / "ca/state.json").write_text('{"version":2,"signer":"00"}')
    with pytest.raises(Incompatible, match="version 2"):
        CertificateAuthority.load(tmp_path / "ca")


def test_the_key_of_another_ca_is_not_used(ca: CertificateAuthority, tmp_path: Path) -> None:
    other = CertificateAuthority.create(tmp_path / "other")
    key = tmp_path / "other/cas" / f"{other.state.signer}.key"
    (tmp_path / "ca/cas" / f"{ca.state.signer}.key").write_bytes(key.read_bytes())
    with pytest.raises(CorruptRecord, match="not the pair"):
        CertificateAuthority.load(tmp_path / "ca").issue(SERVER)
