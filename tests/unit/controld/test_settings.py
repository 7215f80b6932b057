"""Impossible values of controld.toml are named; the cluster's constants are written once."""

from __future__ import annotations

import pytest

from controld.settings import check_config, cluster_settings
from corefleet.adapters.memory_store import MemoryStore
from corefleet.clock import SystemClock
from corefleet.config import ControldConfig, parse
from corefleet.errors import ConfigError
from corefleet.messages.records import ClusterSettings

GRANT = 'id = "c"\n[[auth.grants]]\nidentities = ["client/*"]\n'


def test_the_defaults_are_possible() -> None:
    check_config(parse('id = "c1"\ninsecure = true', ControldConfig, "t"), "t")


def test_what_grants_can_say_is_possible() -> None:
    text = f"""insecure = true\n{GRANT}verbs = ["*"]
pools = ["support*"]
tenants = ["acme", ""]
[[auth.grants]]
subjects = ["auth0|5f", "*@example.org"]
groups = ["ml"]
verbs = ["pools-read", "drain", "reflect"]
[auth.tokens]
keys = "/etc/corefleet/issuer.json"
issuer = "https://issuer.example"
"""
    check_config(parse(text, ControldConfig, "t"), "t")


def test_a_misspelt_key_of_a_grant_is_named() -> None:
    with pytest.raises(ConfigError, match="poools"):
        parse(f'{GRANT}verbs = ["read"]\npoools = ["p"]', ControldConfig, "t")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('id = "a b"', "id"),
        ('id = "c"\nlisten = "7070"', "listen"),
        ('id = "c"\nlisten = "host:99999"', "listen"),
        ('id = "c"\nmetrics = "nowhere"', "metrics"),
        ('id = "c"\nlease_ttl_s = 0.0', "lease_ttl_s"),
        ('id = "c"\nsample_size = 0', "sample_size"),
        ('id = "c"\n[cluster]\nshards = 4\nstreams = 8', "streams"),
        ('id = "c"\n[cluster]\nreplicas = 7', "cluster.replicas"),
        ('id = "c"\n[cluster]\nmax_input_bytes = 9000000', "cluster.max_input_bytes"),
        ('id = "c"\n[liveness]\nlost_after_s = 0.1', "liveness.lost_after_s"),
        ('id = "c"\n[drains]\nmax_share = 1.5', "drains.max_share"),
        ('id = "c"\n[auth.tokens]\nkeys = ""\nissuer = "i"', "auth.tokens.keys"),
        (
            'id = "c"\n[auth.tokens]\nkeys = "k"\nissuer = "i"\nleeway_s = -1',
            "auth.tokens.leeway_s",
        ),
        ('id = "c"\n[[auth.grants]]\nverbs = ["read"]', r"auth.grants\[0\].identities"),
        (f"{GRANT}verbs = []", r"auth.grants\[0\].verbs"),
        (f'{GRANT}verbs = ["reed"]', r"auth.grants\[0\].verbs"),
        (f'{GRANT}verbs = ["drain"]\npools = ["p"]', r"auth.grants\[0\].verbs"),
        (f'{GRANT}verbs = ["pools-write"]\ntenants = ["t"]', r"auth.grants\[0\].verbs"),
        (f'{GRANT}verbs = ["read"]\npools = []', r"auth.grants\[0\].pools"),
        (f'{GRANT}verbs = ["read"]\ntenants = ["[ab]"]', r"auth.grants\[0\].tenants"),
        ('id = "c"\n[nats]\nservers = []', "nats.servers"),
        ('id = "c"\n[etcd]\nendpoints = []', "etcd.endpoints"),
        ('id = "c"', "tls"),
        ('id = "c"\ninsecure = true\nlisten = "10.0.0.1:7070"', "listen"),
        ('id = "c"\ninsecure = true\nadvertise = "c1:7070"', "advertise"),
        ('id = "c"\ninsecure = true\nmetrics = "0.0.0.0:9100"', "metrics"),
        ('id = "c"\ninsecure = true\n[nats]\nservers = ["nats://n1:4222"]', "nats.servers"),
        ('id = "c"\ninsecure = true\n[etcd]\nendpoints = ["e1:2379"]', "etcd.endpoints"),
        ('id = "c"\ntls = { ca = "/a", cert = "/b", key = "/c" }', "nats.tls"),
    ],
)
def test_an_impossible_value_is_named(text: str, field: str) -> None:
    config = parse(text, ControldConfig, "t")
    with pytest.raises(ConfigError, match=rf"^t: {field}: "):
        check_config(config, "t")


async def test_the_first_writes_the_settings_and_the_second_takes_them() -> None:
    store = MemoryStore(SystemClock())
    first = ClusterSettings(shards=16, streams=2)
    assert await cluster_settings(store, first) == first
    assert await cluster_settings(store, ClusterSettings(shards=64)) == first
    await store.close()
