"""What a certificate may do on NATS, held against the real server: docs/security.md."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from corefleet import subjects
from corefleet.adapters.nats_bus import NatsBus
from corefleet.adapters.nats_log import NatsLog
from corefleet.bus import Entry, Incoming, Stored
from corefleet.config import NatsConfig, TlsConfig
from corefleet.errors import Unavailable
from corefleet.identity import ROLES, Identity
from corefleet.messages.records import ClusterSettings
from corefleet.nats_config import Member
from corefleet.pki import CertificateAuthority
from corefleet.subjects import Layout
from tests.servers.secured import SecuredNats, write_tls

A, B = Identity("agentd", "a"), Identity("agentd", "b")
CONTROLD = Identity("controld", "c1")
OPERATOR = Identity("operator", "o1")
MEMBERS = [Member(A, "r1"), Member(B, "r1"), Member(CONTROLD), Member(OPERATOR)]
LAYOUT = Layout(4, 1)
OTHER = "2-01hzy2k3m4n5p6q7r8s9t0v1w2"
TASK = "1-01hzy2k3m4n5p6q7r8s9t0v1w2"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path_factory.mktemp("authority") / "ca")


@pytest.fixture(scope="module")
def server(
    authority: CertificateAuthority, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecuredNats]:
    with SecuredNats(tmp_path_factory.mktemp("nats"), authority, MEMBERS) as running:
        yield running


class Holder:
    """A client with a certificate; hears of every refusal."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.heard: asyncio.Queue[Msg] = asyncio.Queue()
        self.refused: asyncio.Queue[str] = asyncio.Queue()
        self.gone = asyncio.Event()

    async def trouble(self, error: Exception) -> None:
        self.refused.put_nowait(str(error).lower())

    async def closed(self) -> None:
        self.gone.set()

    async def listen(self, subject: str) -> None:
        async def take(message: Msg) -> None:
            self.heard.put_nowait(message)

        await self.client.subscribe(subject, cb=take)
        await self.client.flush()

    async def say(self, subject: str, payload: bytes = b"x", reply: str = "") -> None:
        await self.client.publish(subject, payload, reply=reply)
        await self.client.flush()

    async def is_refused(self, subject: str) -> None:
        async with asyncio.timeout(WAIT_S):
            said = await self.refused.get()
        assert "permissions violation" in said
        assert f'"{subject.lower()}"' in said

    async def hears(self) -> Msg:
        async with asyncio.timeout(WAIT_S):
            return await self.heard.get()


class Holders:
    """Connects whoever is asked for."""

    def __init__(
        self, server: SecuredNats, authority: CertificateAuthority, directory: Path
    ) -> None:
        self.server = server
        self.authority = authority
        self._directory = directory
        self._open = AsyncExitStack()
        self._made = 0

    async def __call__(self, identity: Identity) -> Holder:
        self._made += 1
        mine = write_tls(self.authority, self._directory / str(self._made), identity)
        trusted = self.authority.bundle_pem.decode()
        holder = Holder(Client())
        await holder.client.connect(
            self.server.url,
            tls=context(mine, trusted),
            inbox_prefix=subjects.inboxes(identity.role, identity.name),
            allow_reconnect=False,
            max_reconnect_attempts=1,
            error_cb=holder.trouble,
            closed_cb=holder.closed,
        )
        self._open.push_async_callback(holder.client.close)
        return holder

    async def close(self) -> None:
        await self._open.aclose()


def context(mine: TlsConfig, trusted: str) -> ssl.SSLContext:
    made = ssl.create_default_context(cadata=trusted)
    made.load_cert_chain(mine.cert, mine.key)
    return made


@pytest.fixture
async def holders(
    server: SecuredNats, authority: CertificateAuthority, tmp_path: Path
) -> AsyncIterator[Holders]:
    made = Holders(server, authority, tmp_path)
    yield made
    await made.close()


AS_B = {
    "a beat": subjects.beat("r1", "b"),
    "a beat in another rack": subjects.beat("r2", "a"),
    "a registration": subjects.control_register("b"),
    "an attempt given back": subjects.shard_returned(1, "b"),
    "an assignment": subjects.node_assign("b"),
    "a drop": subjects.node_drop("b"),
    "a digest": subjects.digest("r1"),
    "a verdict": subjects.VERDICTS,
    "pools": subjects.POOLS_CHANGED,
    "a cancel": subjects.shard_cancel(1),
    "an owner's mark": LAYOUT.owner(1),
    "an answer": subjects.inboxes("controld", "c1") + ".abcd.1",
    "a stream's end": "$JS.API.STREAM.DELETE.cf-0",
}


@pytest.mark.parametrize("what", AS_B)
async def test_a_node_cannot_say_what_is_not_its_to_say(holders: Holders, what: str) -> None:
    a, controld = await holders(A), await holders(CONTROLD)
    subject = AS_B[what]
    for kind in (subjects.beats("*"), subjects.CONTROL_REGISTER, subjects.shard_calls("*")):
        await controld.listen(kind)

    await a.say(subject)

    await a.is_refused(subject)
    await a.say(subjects.beat("r1", "a"), b"mine")
    first = await controld.hears()
    assert (first.subject, first.data) == (subjects.beat("r1", "a"), b"mine")


@pytest.mark.parametrize(
    "subject",
    [
        subjects.node_assign("b"),
        subjects.node_assign("*"),
        subjects.inboxes("agentd", "b") + ".>",
        subjects.inboxes("controld", "c1") + ".>",
        subjects.ALL_INBOXES,
        subjects.beats("r1"),
        subjects.CONTROL_SUBMIT,
        subjects.events_of(TASK),
        subjects.ALL_TASKS,
        ">",
    ],
)
async def test_a_node_cannot_listen_to_others(holders: Holders, subject: str) -> None:
    a = await holders(A)

    await a.listen(subject)

    await a.is_refused(subject)


async def test_a_node_is_asked_and_answers_once(holders: Holders) -> None:
    a, b, controld = await holders(A), await holders(B), await holders(CONTROLD)
    inbox = subjects.inboxes("controld", "c1") + ".abcd.7"
    await controld.listen(inbox)
    await a.listen(subjects.node_assign("a"))

    await controld.say(subjects.node_assign("a"), b"work", inbox)
    asked = await a.hears()
    await b.say(asked.reply, b"by b")
    await b.is_refused(inbox)
    await a.say(asked.reply, b"by a")
    await a.say(asked.reply, b"again")
    await a.is_refused(inbox)

    assert (await controld.hears()).data == b"by a"
    assert controld.heard.empty()


async def test_the_server_answers_a_node_for_nobody_else(holders: Holders, tmp_path: Path) -> None:
    """The server sends its answers to any subject: what it can be made to say must be harmless."""
    a, b, controld = await holders(A), await holders(B), await holders(CONTROLD)
    maker = await enter(holders.server, holders.authority, tmp_path / "c", CONTROLD)
    await NatsLog(maker).ensure(ClusterSettings(shards=4, streams=1, replicas=1))
    await maker.close()
    await b.listen(subjects.node_assign("b"))
    journal = LAYOUT.journal(1, TASK)
    inbox = subjects.inboxes("agentd", "a") + ".x"
    await a.listen(inbox)
    newest = json.dumps({"last_by_subj": journal}).encode()
    delete, purge = ("$JS.API.STREAM.DELETE.cf-0", "$JS.API.STREAM.PURGE.cf-0")

    await a.say(journal, b"", inbox)
    first = json.loads((await a.hears()).data)["seq"]
    for subject in (delete, purge, subjects.node_assign("b")):
        await a.say(journal, b"", subject)
        await a.say(subjects.stream_message("cf-0"), newest, subject)
        await a.say(subjects.stream_messages("cf-0"), newest, subject)
        await a.is_refused(subjects.stream_messages("cf-0"))
    await a.say(journal, b"", inbox)

    assert json.loads((await a.hears()).data)["seq"] == first + 4
    answer = await controld.client.request(subjects.stream_info("cf-0"), b"", timeout=WAIT_S)
    assert json.loads(answer.data)["state"]["messages"] >= 5, "nothing was purged or deleted"
    for _ in range(2):
        assert (await b.hears()).data[:1] == b"{", "no message of ours begins so"


async def enter(
    server: SecuredNats, authority: CertificateAuthority, directory: Path, identity: Identity
) -> NatsBus:
    config = NatsConfig(servers=(server.url,), tls=write_tls(authority, directory, identity))
    return await NatsBus.connect(config, "permissions", lambda error: None)


@pytest.mark.parametrize(
    "identity",
    [
        *(Identity(role, "a") for role in ROLES if role not in ("agentd", "controld", "operator")),
        Identity("agentd", "stranger"),
    ],
    ids=str,
)
async def test_who_has_no_business_on_nats_does_not_get_in(
    server: SecuredNats, authority: CertificateAuthority, tmp_path: Path, identity: Identity
) -> None:
    with pytest.raises(Unavailable):
        await enter(server, authority, tmp_path, identity)


async def test_a_certificate_of_a_foreign_authority_does_not_get_in(
    server: SecuredNats, authority: CertificateAuthority, tmp_path: Path
) -> None:
    foreign = CertificateAuthority.create(tmp_path / "foreign")
    theirs = write_tls(foreign, tmp_path / "theirs", CONTROLD)
    ours = write_tls(authority, tmp_path / "ours", CONTROLD)
    tls = TlsConfig(ca=ours.ca, cert=theirs.cert, key=theirs.key)

    with pytest.raises(Unavailable):
        await NatsBus.connect(
            NatsConfig(servers=(server.url,), tls=tls), "foreign", lambda error: None
        )


async def test_a_controld_and_a_node_can_do_all_that_they_do(
    server: SecuredNats, authority: CertificateAuthority, tmp_path: Path
) -> None:
    troubles: list[Exception] = []
    buses = []
    for identity in (CONTROLD, A):
        tls = write_tls(authority, tmp_path / identity.role, identity)
        config = NatsConfig(servers=(server.url,), tls=tls)
        buses.append(await NatsBus.connect(config, str(identity), troubles.append))
    controld, node = buses
    try:
        assert node.inboxes == subjects.inboxes("agentd", "a")
        await _streams_work(NatsLog(controld), NatsLog(node, replicas=False))
        await _calls_work(controld, node)
        assert troubles == []
    finally:
        await node.close()
        await controld.close()


async def _streams_work(log: NatsLog, of_node: NatsLog) -> None:
    await log.ensure(ClusterSettings(shards=4, streams=1, replicas=1))
    record, journal = LAYOUT.task(2, OTHER), LAYOUT.journal(2, OTHER)
    followed: asyncio.Queue[Stored] = asyncio.Queue()
    follower = await log.follow(0, [LAYOUT.owned(2)], followed.put_nowait)
    placed = await log.append(Entry(record, b"placed", fence_sequence=0), WAIT_S)
    assert (await asyncio.wait_for(followed.get(), WAIT_S)).sequence == placed
    await of_node.append(Entry(journal, b"0", placed, record), WAIT_S)
    tail = await of_node.append(Entry(journal, b"1", placed, record), WAIT_S)
    for reader in (log, of_node):
        found = await reader.read(journal, tail, WAIT_S)
        assert [each.payload for each in found] == [b"0", b"1"]
    await of_node.append_batch(
        [Entry(LAYOUT.head(2, "p", "s"), b"h"), Entry(LAYOUT.result(2, OTHER), b"r")], WAIT_S
    )
    await of_node.append(Entry(journal, b"short", rollup=True), WAIT_S)
    assert (await log.append(Entry(LAYOUT.owner(2), b"mine"), WAIT_S)) > tail
    assert await log.usage(0, WAIT_S) == 0
    await follower.close()


async def _calls_work(controld: NatsBus, node: NatsBus) -> None:
    """Both ways, each with an answer."""
    for asker, answerer, subject in (
        (controld, node, subjects.node_assign("a")),
        (controld, node, subjects.node_inventory("a")),
        (node, controld, subjects.control_register("a")),
        (node, controld, subjects.CONTROL_SUBMIT),
        (controld, controld, subjects.observe("c1")),
        (controld, controld, subjects.shard_cancel(1)),
    ):

        def answer(message: Incoming, bus: NatsBus = answerer) -> None:
            bus.publish(message.reply, b"done " + message.payload)

        subscription = await answerer.subscribe(subject, answer)
        assert await asker.request(subject, b"this", WAIT_S) == b"done this"
        await subscription.close()
    for teller, listener, subject in (
        (node, controld, subjects.beat("r1", "a")),
        (node, controld, subjects.shard_returned(1, "a")),
        (node, controld, subjects.events("c1", TASK)),
        (controld, node, subjects.node_drop("a")),
        (controld, node, subjects.node_yield("a")),
        (controld, node, subjects.digest("r1")),
        (controld, node, subjects.VERDICTS),
        (controld, node, subjects.POOLS_CHANGED),
        (controld, controld, subjects.PEERS),
        (controld, controld, subjects.QUOTAS),
        (controld, controld, subjects.LOSS_VOTES),
        (controld, controld, subjects.OVERVIEW),
        (controld, controld, subjects.overview_of("c1")),
    ):
        heard: asyncio.Queue[Incoming] = asyncio.Queue()
        subscription = await listener.subscribe(subject, heard.put_nowait)
        teller.publish(subject, b"news")
        assert (await asyncio.wait_for(heard.get(), WAIT_S)).payload == b"news"
        await subscription.close()


async def test_an_answer_goes_to_inboxes_only(holders: Holders, tmp_path: Path) -> None:
    """A node that asks for the answer elsewhere would let controld speak for it."""
    a = await holders(A)
    controld = await enter(holders.server, holders.authority, tmp_path / "c", CONTROLD)
    heard: asyncio.Queue[Incoming] = asyncio.Queue()
    await controld.subscribe(subjects.CONTROL_SUBMIT, heard.put_nowait)

    await a.say(subjects.CONTROL_SUBMIT, b"x", subjects.node_assign("b"))
    await a.say(subjects.CONTROL_SUBMIT, b"x", subjects.inboxes("agentd", "a") + ".1")

    async with asyncio.timeout(WAIT_S):
        replies = [(await heard.get()).reply for _ in range(2)]
    assert replies == ["", subjects.inboxes("agentd", "a") + ".1"]
    await controld.close()


async def test_a_member_that_is_removed_is_cut_off_and_the_others_stay(
    holders: Holders, tmp_path: Path
) -> None:
    a, b, controld = await holders(A), await holders(B), await holders(CONTROLD)
    await controld.listen(subjects.beats("r1"))
    try:
        await asyncio.to_thread(
            holders.server.let_in, [each for each in MEMBERS if each.identity != A]
        )

        async with asyncio.timeout(WAIT_S):
            await a.gone.wait()
        await b.say(subjects.beat("r1", "b"), b"still here")
        assert (await controld.hears()).data == b"still here"
        with pytest.raises(Unavailable):
            await enter(holders.server, holders.authority, tmp_path / "again", A)
    finally:
        await asyncio.to_thread(holders.server.let_in, MEMBERS)
    again = await holders(A)
    await again.say(subjects.beat("r1", "a"), b"again")
    assert (await controld.hears()).data == b"again"
