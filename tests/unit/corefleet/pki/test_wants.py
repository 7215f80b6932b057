"""Hosts, lists of wanted certificates, requests, and when a certificate is made anew."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import string
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from corefleet.errors import Conflict, InvalidInput
from corefleet.identity import ROLES, Identity, Role
from corefleet.pki import CertificateAuthority, Want, holding
from corefleet.pki.certificates import Signer, check_csr, make_ca, make_csr, new_key
from corefleet.pki.holding import Renewal, reason
from corefleet.pki.inventory import parse
from corefleet.pki.reading import read_certs
from corefleet.pki.wants import SERVERS, check_hosts

ME = Identity("agentd", "n1")
HOSTS = ("n1.example.org", "10.0.0.1")
DAY_S = 86_400

labels = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=8)
host_names = st.lists(labels, min_size=1, max_size=3).map(".".join)
hosts = st.one_of(host_names, st.ip_addresses().map(str))


@given(st.text(alphabet=string.printable + "é。", max_size=80))
def test_any_text_is_an_address_a_host_name_or_refused(text: str) -> None:
    try:
        [host] = check_hosts("agentd", [text])
    except InvalidInput:
        return
    assert host == host.lower()
    assert check_hosts("agentd", [host]) == (host,)
    assert not set(host) - set(string.ascii_lowercase + string.digits + "-.:")


@given(st.ip_addresses())
def test_an_address_is_spelled_in_one_way(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    if getattr(address, "scope_id", None) is None:
        assert check_hosts("etcd", [address.exploded.upper()]) == (str(address),)


@pytest.mark.parametrize(
    "host",
    [
        "", ".", "a..b", "-a", "a-", "a_b", "*.example.org", "a" * 64, "a." * 127 + "a", "1",
        "10.0.0.256", "fe80::1%eth0", "a b", "a,b", "a.example.org.", "n1.agentd.corefleet", "a/b",
    ],
)  # fmt: skip
def test_what_is_no_host_is_refused(host: str) -> None:
    with pytest.raises(InvalidInput, match="host: "):
        check_hosts("agentd", [host])


@pytest.mark.parametrize("role", ROLES)
def test_only_who_listens_has_hosts(role: Role) -> None:
    if role in SERVERS:
        assert check_hosts(role, ["A.example.org", "a.EXAMPLE.org"]) == ("a.example.org",)
    else:
        with pytest.raises(InvalidInput, match="does not listen"):
            check_hosts(role, ["a.example.org"])


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(labels, st.lists(hosts, max_size=3)), max_size=4, unique_by=lambda line: line[0]
    )
)
def test_a_list_says_the_same_in_both_forms(lines: list[tuple[str, list[str]]]) -> None:
    try:
        wants = [Want(Identity("nats", name), check_hosts("nats", them)) for name, them in lines]
    except InvalidInput:
        return
    tabs = "".join(f"nats\t{name}\t{','.join(them)}\n" for name, them in lines)
    objects = "".join(
        json.dumps({"role": "nats", "name": name, "hosts": them}) + "\n" for name, them in lines
    )
    assert parse(f"# all of them\n\n{tabs}", "list") == wants
    assert parse(objects, "list") == wants


def test_hosts_may_be_left_out() -> None:
    assert parse('agentd\tn1\nagentd\tn2\t\n{"role":"client","name":"web"}', "list") == [
        Want(ME),
        Want(Identity("agentd", "n2")),
        Want(Identity("client", "web")),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("agentd n1 n1.example.org", "one tab"),
        ("agentd\tn1\ta\tb", "one tab"),
        ("root\tn1", "Invalid enum value 'root'"),
        ("agentd\t../n1", "1 to 63 of"),
        ("agentd\tn1\tn1_", "host"),
        ('{"role": "agentd"}', "missing required field `name`"),
        ('{"role": "agentd", "name": "n1", "host": []}', "unknown field `host`"),
        ('{"role": "agentd", "name": "n1", "hosts": "n1"}', "Expected `array`"),
        ("{", "truncated"),
        ("agentd\tn0", "each identity once"),
    ],
)
def test_a_wrong_line_is_named_with_what_would_be_right(line: str, expected: str) -> None:
    with pytest.raises(InvalidInput, match=r"^list, line 3: .*") as raised:
        parse(f"agentd\tn0\n\n{line}\n", "list")
    assert expected in str(raised.value)


@settings(max_examples=40)
@given(st.lists(hosts, max_size=4))
def test_a_request_for_just_these_names_is_accepted(them: list[str]) -> None:
    try:
        wanted = check_hosts("agentd", them)
    except InvalidInput:
        return
    assert check_csr(make_csr(KEY, ME, wanted), ME, wanted) == KEY.public_key()


KEY = new_key()


@pytest.mark.parametrize(
    ("identity", "asked"),
    [
        (Identity("agentd", "n2"), HOSTS),
        (Identity("operator", "n1"), ()),
        (Identity("controld", "n1"), HOSTS),
        (ME, HOSTS[:1]),
        (ME, (*HOSTS, "n2.example.org")),
        (ME, (HOSTS[0], "10.0.0.2")),
    ],
)
def test_a_request_for_other_names_is_refused(identity: Identity, asked: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match=r"csr: .* for agentd/n1"):
        check_csr(make_csr(KEY, identity, asked), ME, HOSTS)


def test_a_request_with_another_kind_of_key_or_damaged_is_refused() -> None:
    weak = ec.generate_private_key(ec.SECP192R1())
    with pytest.raises(InvalidInput, match="P-256"):
        check_csr(make_csr(weak, ME, HOSTS), ME, HOSTS)
    with pytest.raises(InvalidInput, match="in PEM"):
        check_csr(b"hello", ME, HOSTS)


ISSUED = Signer(make_ca(1.8e9, 100)).sign(ME, HOSTS, None, 1.8e9, 1.8e9 + DAY_S)


CSR = make_csr(KEY, ME, HOSTS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pem", [CSR, ISSUED.cert_pem], ids=["request", "certificate"])
@given(
    damage=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=3
    )
)
def test_what_is_damaged_is_refused_and_nothing_worse(
    pem: bytes, damage: list[tuple[float, int]]
) -> None:
    """A request comes from a node that may be anybody's."""
    first, *body, last = pem.decode().splitlines()
    der = bytearray(base64.b64decode("".join(body)))
    for where, byte in damage:
        der[int(where * len(der))] = byte
    damaged = "\n".join([first, base64.b64encode(der).decode(), last, ""]).encode()
    with contextlib.suppress(InvalidInput):
        if pem == CSR:
            assert check_csr(damaged, ME, HOSTS) == KEY.public_key()
        else:
            read_certs(damaged, Path("node.pem"))


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path / "ca", clock=lambda: 1_800_000_000)


def test_a_certificate_is_made_anew_for_good_reasons_only(ca: CertificateAuthority) -> None:
    issued = ca.issue(ME, HOSTS, days=90)
    held = read_certs(issued.cert_pem, Path())[0]
    want, signer = Want(ME, tuple(reversed(HOSTS))), ca.state.signer

    def after(days: float, before_days: float | None = 30, by: str = signer) -> str:
        before = None if before_days is None else before_days * DAY_S
        return reason(held, True, want, Renewal(1_800_000_000 + days * DAY_S, before, by))

    assert after(0) == after(59.9) == after(0, by="") == ""
    assert after(60) == after(100) == "expires soon"
    assert after(0, None) == "asked for"
    assert after(0, by="0" * 16) == "signed by another CA"
    now = Renewal(1_800_000_000, 30 * DAY_S, signer)
    assert reason(None, False, want, now) == "there was none"
    assert reason(held, False, want, now) == "the key does not fit"
    assert reason(held, True, Want(ME, HOSTS[:1]), now) == "other names"
    assert reason(held, True, Want(Identity("agentd", "n2"), HOSTS), now) == "other names"


def test_a_key_made_on_a_node_never_leaves_it(ca: CertificateAuthority, tmp_path: Path) -> None:
    node, want = tmp_path / "node", Want(ME, HOSTS)
    csr, made = holding.request(node, want)
    assert made
    assert holding.request(node, want) == (csr, False), "asked again, the request is the same"
    issued = ca.sign(csr.read_bytes(), ME, HOSTS)
    assert issued.key_pem == b""
    (node / "ca.pem").write_bytes(ca.bundle_pem)
    assert holding.install(node, "agentd", issued.cert_pem, None)
    held = holding.read_facts(node, "agentd")
    assert held is not None
    assert (held.serial, held.identity) == (issued.serial, ME)
    assert holding.has_fitting_key(node, "agentd", held)
    assert not list(node.glob("agentd.next*")) + list(node.glob("*.csr"))
    assert not holding.install(node, "agentd", issued.cert_pem, None), "it is there already"


def test_other_hosts_need_another_request(tmp_path: Path) -> None:
    csr, _ = holding.request(tmp_path, Want(ME, HOSTS))
    first = csr.read_bytes()
    assert holding.request(tmp_path, Want(ME, HOSTS[:1]))[1]
    assert csr.read_bytes() != first


def test_a_certificate_that_does_not_belong_here_is_not_installed(
    ca: CertificateAuthority, tmp_path: Path
) -> None:
    node = tmp_path / "node"
    csr, _ = holding.request(node, Want(ME))
    (node / "ca.pem").write_bytes(ca.bundle_pem)
    stranger = CertificateAuthority.create(tmp_path / "other")
    with pytest.raises(InvalidInput, match=r"ca\.pem signed"):
        holding.install(node, "agentd", stranger.sign(csr.read_bytes(), ME).cert_pem, None)
    with pytest.raises(Conflict, match="another key or request"):
        holding.install(node, "agentd", ca.issue(ME).cert_pem, None)
    with pytest.raises(InvalidInput, match="of the role nats"):
        holding.install(node, "nats", ca.sign(csr.read_bytes(), ME).cert_pem, None)
    assert holding.read_facts(node, "agentd") is None
