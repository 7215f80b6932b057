"""What a controld is set to: its own configuration checked, the cluster's from the store."""

from __future__ import annotations

import structlog

from controld.core.grants import ALL, TASK_VERBS, VERBS, Grant
from corefleet.channels import Channel, check_channels
from corefleet.codec import decode, encode
from corefleet.config import AuthConfig, ControldConfig, GrantConfig
from corefleet.errors import ConfigError, InvalidInput, Unavailable
from corefleet.ids import check_name
from corefleet.messages.records import ClusterSettings
from corefleet.store import Compare, Put, Store
from corefleet.subjects import SETTINGS, Layout

_MAX_LEEWAY_S = 300.0

_log = structlog.get_logger(__name__)


def check_config(config: ControldConfig, where: str) -> None:
    """Raise ConfigError naming the key whose value is not possible."""
    try:
        check_name("id", config.id)
        _check_address("listen", config.listen)
        if config.advertise:
            _check_address("advertise", config.advertise)
        elif config.listen.rpartition(":")[0] in ("0.0.0.0", "[::]", "::"):
            raise InvalidInput(
                "advertise", "", f"host:port where others reach what listens on {config.listen}"
            )
        if config.metrics:
            _check_address("metrics", config.metrics)
        _check_positive(config)
        cluster = config.cluster
        Layout(cluster.shards, cluster.streams)
        if not 1 <= cluster.replicas <= 5:
            raise InvalidInput("cluster.replicas", cluster.replicas, "1 to 5")
        if not 1 <= cluster.max_input_bytes <= 512 * 1024:
            raise InvalidInput(
                "cluster.max_input_bytes", cluster.max_input_bytes, "1 to 524288 (512 KiB)"
            )
        if not 0 <= config.drains.max_share <= 1:
            raise InvalidInput("drains.max_share", config.drains.max_share, "0 to 1")
        _check_auth(config.auth)
        times = config.liveness
        if not times.beat_interval_s < times.suspect_after_s < times.lost_after_s:
            raise InvalidInput(
                "liveness.lost_after_s", times.lost_after_s,
                "beat_interval_s < suspect_after_s < lost_after_s",
            )  # fmt: skip
        check_channels(config.insecure, channels_of(config))
    except InvalidInput as error:
        raise ConfigError(f"{where}: {error}") from error


def channels_of(config: ControldConfig) -> tuple[Channel, ...]:
    """Return what a controld listens on and connects to, and what secures it."""
    return (
        *(Channel(key, (address,) if address else (), "tls", config.tls) for key, address in (
            ("listen", config.listen), ("advertise", config.advertise), ("metrics", config.metrics),
        )),
        Channel("nats.servers", config.nats.servers, "nats.tls", config.nats.tls),
        Channel("etcd.endpoints", config.etcd.endpoints, "etcd.tls", config.etcd.tls),
    )  # fmt: skip


async def cluster_settings(store: Store, wanted: ClusterSettings) -> ClusterSettings:
    """Return the cluster's constants, written by the first controld that comes.

    Raises Unavailable.
    """
    found = await store.get(SETTINGS)
    if found is None:
        try:
            await store.commit([Compare(SETTINGS, 0)], [Put(SETTINGS, encode(wanted))])
        except Unavailable as error:
            _log.warning("settings perhaps not written", error=str(error))
        found = await store.get(SETTINGS)
        if found is None:
            raise Unavailable("the cluster's settings could not be written")
    settings = decode(found.value, ClusterSettings)
    if settings != wanted:
        _log.warning(
            "the cluster's settings are not those of the configuration; the cluster's count",
            cluster=settings,
            configuration=wanted,
        )
    return settings


def grant_of(config: GrantConfig) -> Grant:
    """Return the grant that a table `[[auth.grants]]` describes."""
    return Grant(
        identities=config.identities,
        subjects=config.subjects,
        groups=config.groups,
        verbs=config.verbs,
        pools=config.pools,
        tenants=config.tenants,
    )


def _check_auth(auth: AuthConfig) -> None:
    tokens = auth.tokens
    if tokens is not None:
        for key in ("keys", "issuer", "audience", "subject_claim", "groups_claim"):
            if not getattr(tokens, key):
                raise InvalidInput(f"auth.tokens.{key}", "", "a text that is not empty")
        if not 0 <= tokens.leeway_s <= _MAX_LEEWAY_S:
            raise InvalidInput("auth.tokens.leeway_s", tokens.leeway_s, f"0 to {_MAX_LEEWAY_S}")
    for number, grant in enumerate(auth.grants):
        _check_grant(f"auth.grants[{number}]", grant)


def _check_grant(where: str, grant: GrantConfig) -> None:
    if not (grant.identities or grant.subjects or grant.groups):
        raise InvalidInput(
            f"{where}.identities", (), "somebody: identities, subjects or groups, one glob or more"
        )
    for key in ("identities", "subjects", "groups", "pools", "tenants"):
        for glob in getattr(grant, key):
            if "[" in glob or not glob.isprintable():
                raise InvalidInput(f"{where}.{key}", glob, "a name, or a glob of `*` and `?`")
    if not grant.verbs:
        raise InvalidInput(f"{where}.verbs", (), f"one or more of {', '.join(VERBS)}, or `*`")
    for key in ("pools", "tenants"):
        if not getattr(grant, key):
            raise InvalidInput(f"{where}.{key}", (), 'one glob or more; ["*"] is all')
    given = grant_of(grant).gives()
    for verb in grant.verbs:
        if verb == ALL or verb in given:
            continue
        if verb not in VERBS:
            raise InvalidInput(f"{where}.verbs", verb, f"one of {', '.join(VERBS)}, or `*`")
        tasks = ", ".join(each for each in VERBS if each in TASK_VERBS)
        raise InvalidInput(
            f"{where}.verbs", verb,
            f"only {tasks} in a grant for some tenants, and nothing of the whole fleet in a "
            "grant for some pools",
        )  # fmt: skip


def _check_address(field: str, value: str) -> None:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(field, value, "host:port, e.g. 127.0.0.1:7070; port 0 takes a free one")


def _check_positive(config: ControldConfig) -> None:
    times = config.liveness
    values = {
        "lease_ttl_s": config.lease_ttl_s,
        "sample_size": config.sample_size,
        "overload.cpu_limit": config.overload.cpu_limit,
        "overload.loop_lag_limit_s": config.overload.loop_lag_limit_s,
        "nats.connect_timeout_s": config.nats.connect_timeout_s,
        "etcd.timeout_s": config.etcd.timeout_s,
        "liveness.beat_interval_s": times.beat_interval_s,
        "liveness.probe_timeout_s": times.probe_timeout_s,
        "liveness.cut_after_s": times.cut_after_s,
        "liveness.digest_interval_s": times.digest_interval_s,
    }
    for field, value in values.items():
        if value <= 0:
            raise InvalidInput(field, value, "more than 0")
    for field, named in (
        ("nats.servers", config.nats.servers),
        ("etcd.endpoints", config.etcd.endpoints),
    ):
        if not named:
            raise InvalidInput(field, named, "one address or more")
