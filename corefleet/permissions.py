"""Which subjects of NATS each holder of a certificate may publish and subscribe to. Pure.

What is not named is refused by the server. Who answers a request needs no permission for
the asker's inbox: `responses` lets it answer what it was asked, once.
"""

from __future__ import annotations

from dataclasses import dataclass

from corefleet import subjects
from corefleet.identity import Identity
from corefleet.subjects import ANY

RESPONSE_EXPIRES_S = 10
"""How long a node may take to answer a request; controlds wait for a second at most."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one user of NATS may do; the subjects are sorted and may have wildcards."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    responses: bool = False


def permissions_of(identity: Identity, rack: str = ANY) -> Permissions | None:
    """Return what `identity` may do on NATS; None for roles that have no business there.

    `rack` is where a node belongs.
    """
    match identity.role:
        case "agentd":
            return _node(identity.name, rack, _inbox(identity))
        case "controld":
            return _controld(identity.name, _inbox(identity))
        case "operator":
            return _operator(_inbox(identity))
        case _:
            return None


def _inbox(identity: Identity) -> str:
    return f"{subjects.inboxes(identity.role, identity.name)}.>"


def _node(node: str, rack: str, inbox: str) -> Permissions:
    publish = (
        subjects.beat(rack, node),
        subjects.control_register(node),
        subjects.shard_returned(ANY, node),
        subjects.CONTROL_SUBMIT,
        subjects.events(ANY, ANY),
        # A node may run a task of any shard.
        subjects.ALL_TASKS,
        subjects.ALL_HEADS,
        subjects.ALL_JOURNALS,
        subjects.ALL_RESULTS,
        # Never stream_messages: the server sends what a node has stored, as it is, to any
        # subject that the node names for the answer, and so speaks for it as anybody.
        subjects.stream_message(ANY),
        inbox,
    )
    subscribe = (
        *_commands(node),
        subjects.VERDICTS,
        subjects.digest(rack),
        subjects.POOLS_CHANGED,
        inbox,
    )
    return _sorted(publish, subscribe, responses=True)


def _controld(controld: str, inbox: str) -> Permissions:
    peers = (
        subjects.DIGESTS,
        subjects.VERDICTS,
        subjects.LOSS_VOTES,
        subjects.PEERS,
        subjects.QUOTAS,
        subjects.OVERVIEW,
    )
    publish = (
        *peers,
        *_commands(ANY),
        subjects.POOLS_CHANGED,
        subjects.overview_of(ANY),
        subjects.observe(ANY),
        subjects.shard_cancel(ANY),
        subjects.shard_explain(ANY),
        subjects.shard_list(ANY),
        subjects.events(ANY, ANY),
        subjects.ALL_TASKS,
        subjects.ALL_HEADS,
        subjects.ALL_OWNERS,
        subjects.ALL_JOURNALS,
        subjects.ALL_RESULTS,
        subjects.stream_info(ANY),
        subjects.stream_create(ANY),
        subjects.stream_message(ANY),
        subjects.stream_messages(ANY),
        subjects.consumer_create(ANY, ANY),
        subjects.consumer_delete(ANY, ANY),
        subjects.FLOW_CONTROL,
        subjects.ALL_INBOXES,
    )
    subscribe = (
        *peers,
        subjects.beats(ANY),
        subjects.CONTROL_REGISTER,
        subjects.CONTROL_SUBMIT,
        subjects.overview_of(controld),
        subjects.observe(controld),
        subjects.shard_calls(ANY),
        subjects.events(ANY, ANY),
        inbox,
    )
    return _sorted(publish, subscribe)


def _operator(inbox: str) -> Permissions:
    """Saves and restores streams, moves their leaders; hears and says nothing in the fleet."""
    return _sorted((subjects.JETSTREAM_API, subjects.SNAPSHOTS, inbox), (inbox,))


def _commands(node: str) -> tuple[str, ...]:
    return (
        subjects.node_assign(node),
        subjects.node_drop(node),
        subjects.node_yield(node),
        subjects.node_inventory(node),
    )


def _sorted(
    publish: tuple[str, ...], subscribe: tuple[str, ...], *, responses: bool = False
) -> Permissions:
    return Permissions(tuple(sorted(publish)), tuple(sorted(subscribe)), responses)
