"""What the dashboards show: the one source of Grafana's files and of the rendered pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Unit = Literal["short", "s", "percentunit", "ops", "Bps", "bytes"]
"""Names as in Grafana; `ops` is a second."""

RATE = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and the legend of its series with labels in double braces."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    unit: Unit
    queries: tuple[Query, ...]
    what: str


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice above the panels: `$name` in queries stands for values of `label`."""

    name: str
    series: str
    label: str


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    title: str
    panels: tuple[Panel, ...]
    variables: tuple[Variable, ...] = ()


def _panel(title: str, unit: Unit, what: str, *queries: tuple[str, str]) -> Panel:
    return Panel(title, unit, tuple(Query(*query) for query in queries), what)


def _quantile(share: float, metric: str, by: str = "", where: str = "") -> str:
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{where}[{RATE}])))"


def _rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{where}[{RATE}]))"


FLEET = Dashboard(
    "fleet",
    "corefleet: fleet",
    (
        _panel(
            "Nodes by state", "short", "As the controld with most of them sees them.",
            ("max by (state) (corefleet_nodes)", "{{state}}"),
        ),
        _panel(
            "Slots in use", "percentunit", "Over all nodes that are scraped.",
            ("sum by (pool) (corefleet_slots_used) / sum by (pool) (corefleet_slots)", "{{pool}}"),
        ),
        _panel(
            "Tasks ended", "ops", "",
            (_rate("corefleet_tasks_ended_total", "state"), "{{state}}"),
        ),
        _panel(
            "Tasks waiting and in flight", "short", "Of all shards.",
            ("sum(corefleet_queued_tasks)", "waiting"),
            ("sum(corefleet_in_flight_tasks)", "in flight"),
        ),
        _panel(
            "Time until a task is durable", "s", "Of submissions at controlds.",
            (_quantile(0.5, "corefleet_submit_seconds"), "p50"),
            (_quantile(0.99, "corefleet_submit_seconds"), "p99"),
        ),
        _panel(
            "Shards by controld", "short", "Those that it decides for.",
            ("corefleet_shards", "{{instance}}"),
        ),
        _panel(
            "Lateness of timers", "s", "One in a hundred of the event loop's timers is later.",
            (_quantile(0.99, "corefleet_timer_lateness_seconds", "instance"), "{{instance}}"),
        ),
        _panel(
            "CPU of controlds", "short", "Cores.",
            (
                f'rate(process_cpu_seconds_total{{job="controld"}}[{RATE}])',
                "{{instance}}",
            ),
        ),
        _panel(
            "Not admitted", "ops", "By the limit; and refusals for other reasons.",
            (_rate("corefleet_not_admitted_total", "cause"), "{{cause}}"),
            (_rate("corefleet_refusals_total", "error"), "{{error}}"),
        ),
        _panel(
            "Fullest stream", "percentunit", "From 0.8 on nothing is accepted; 0: no limit.",
            ("max(corefleet_stream_used_ratio)", "used"),
        ),
    ),
)  # fmt: skip

_NODE = '{instance=~"$node"}'
NODE = Dashboard(
    "node",
    "corefleet: node",
    (
        _panel(
            "Slots in use", "short", "Tasks that run, by pool and domain.",
            (f"corefleet_slots_used{_NODE}", "{{instance}} {{pool}} d{{domain}}"),
        ),
        _panel(
            "Attempts", "ops", "By what became of them.",
            (_rate("corefleet_attempts_total", "outcome", _NODE), "{{outcome}}"),
        ),
        _panel(
            "Memory bandwidth in use", "percentunit", "Share of the domain's peak.",
            (f"corefleet_memory_bandwidth_used_ratio{_NODE}", "{{instance}} d{{domain}}"),
        ),
        _panel(
            "Memory latency", "short", "The canary's latency against idle.",
            (f"corefleet_memory_latency_ratio{_NODE}", "{{instance}} d{{domain}}"),
        ),
        _panel(
            "CPU that batch may use", "percentunit", "Where something can limit batch.",
            (f"corefleet_batch_cpu_ratio{_NODE}", "{{instance}} d{{domain}}"),
        ),
        _panel(
            "CPU time taken by the hypervisor", "percentunit", "",
            (f"corefleet_cpu_steal_ratio{_NODE}", "{{instance}}"),
        ),
        _panel(
            "Error of the clock", "s",
            "The kernel's estimate, and what it has yet to correct; none without a time service.",
            (f"corefleet_clock_error_seconds{_NODE}", "{{instance}} error"),
            (f"corefleet_clock_offset_seconds{_NODE}", "{{instance}} offset"),
        ),
        _panel(
            "Disks", "percentunit", "Space or inodes, whichever is scarcer.",
            (f"corefleet_disk_used_ratio{_NODE}", "{{instance}} {{directory}}"),
        ),
        _panel(
            "Heartbeats sent", "ops", "Five a second are due.",
            (f"rate(corefleet_heartbeats_sent_total{_NODE}[{RATE}])", "{{instance}}"),
        ),
        _panel(
            "Failures of workers and engines", "short", "Ended unasked, or killed for memory.",
            (f"sum by (kind, name) (corefleet_unit_failures_total{_NODE})", "{{kind}} {{name}}"),
            (f"sum by (name) (corefleet_out_of_memory_total{_NODE})", "memory: {{name}}"),
            (f"sum(corefleet_units_in_trouble{_NODE})", "units in trouble"),
        ),
        _panel(
            "Health", "short", "Signals that are not well; clocks without a time service.",
            (f"corefleet_node_unwell_signals{_NODE}", "{{instance}} signals"),
            (f"1 - corefleet_clock_synchronised{_NODE}", "{{instance}} clock free"),
        ),
        _panel(
            "Processes bound again", "short", "In all; and those drained instead.",
            (f"corefleet_bindings_repaired_total{_NODE}", "{{instance}} repaired"),
            (f"corefleet_bindings_drained_total{_NODE}", "{{instance}} drained"),
        ),
    ),
    (Variable("node", "corefleet_node_epoch", "instance"),),
)  # fmt: skip

_POOL = '{pool=~"$pool"}'
POOL = Dashboard(
    "pool",
    "corefleet: pool",
    (
        _panel(
            "Accepted submissions", "ops", "",
            (_rate("corefleet_submissions_total", "pool", _POOL), "{{pool}}"),
        ),
        _panel(
            "Wait for a place", "s", "From creation to the first place.",
            (_quantile(0.5, "corefleet_queue_wait_seconds", "pool", _POOL), "{{pool}} p50"),
            (_quantile(0.99, "corefleet_queue_wait_seconds", "pool", _POOL), "{{pool}} p99"),
        ),
        _panel(
            "Waiting", "short", "Tasks without a place.",
            (f"sum by (pool) (corefleet_queued_tasks{_POOL})", "{{pool}}"),
        ),
        _panel(
            "In flight", "short", "Tasks with a place.",
            (f"sum by (pool) (corefleet_in_flight_tasks{_POOL})", "{{pool}}"),
        ),
        _panel(
            "Ended", "ops", "",
            (_rate("corefleet_tasks_ended_total", "pool, state", _POOL), "{{pool}} {{state}}"),
        ),
        _panel(
            "Requeues", "short", "Attempts given up by the controlds that run, in all, by why.",
            (f"sum by (pool, cause) (corefleet_requeues_total{_POOL})", "{{pool}} {{cause}}"),
        ),
        _panel(
            "Not admitted", "ops", "Submissions over a limit.",
            (_rate("corefleet_not_admitted_total", "pool, cause", _POOL), "{{pool}} {{cause}}"),
        ),
        _panel(
            "Shares of the pool's rate", "ops", "What each controld may accept a second.",
            (f"corefleet_quota_tasks_per_second{_POOL}", "{{pool}} {{instance}}"),
        ),
    ),
    (Variable("pool", "corefleet_queue_wait_seconds_count", "pool"),),
)  # fmt: skip

QUALITY = Dashboard(
    "scheduling",
    "corefleet: scheduling quality",
    (
        _panel(
            "Balance", "short", "Variation of the share of places in use over nodes; 0 is even.",
            ("max(corefleet_balance_variation_ratio)", "fleet"),
            ("max by (pool) (corefleet_pool_balance_variation_ratio)", "{{pool}}"),
        ),
        _panel(
            "Sessions at home", "ops", "Placements by what they did to the session's home.",
            (_rate("corefleet_affinity_total", "home"), "{{home}}"),
        ),
        _panel(
            "Time of one placement", "s", "The core's, its write and offer apart.",
            (_quantile(0.5, "corefleet_decision_seconds"), "p50"),
            (_quantile(0.99, "corefleet_decision_seconds"), "p99"),
        ),
        _panel(
            "Wait for a place", "s", "From creation to the first place, all pools.",
            (_quantile(0.5, "corefleet_queue_wait_seconds"), "p50"),
            (_quantile(0.99, "corefleet_queue_wait_seconds"), "p99"),
        ),
        _panel(
            "Answers of nodes", "ops", "Offers that were accepted, refused, or not answered.",
            (_rate("corefleet_assignments_total", "answer"), "{{answer}}"),
        ),
        _panel(
            "Placements", "ops", "And those that follow an attempt that was given up.",
            (f"sum(rate(corefleet_placements_total[{RATE}]))", "placed"),
            (f"sum(rate(corefleet_requeues_total[{RATE}]))", "requeued"),
            (f"sum(rate(corefleet_yields_asked_total[{RATE}]))", "yields asked"),
        ),
    ),
)  # fmt: skip

TAKEOVERS = Dashboard(
    "takeovers",
    "corefleet: take-overs",
    (
        _panel(
            "Controlds", "short", "Registered, as most see it; those that may decide.",
            ("max(corefleet_controlds)", "registered"),
            ("sum(corefleet_may_act)", "may decide"),
        ),
        _panel(
            "Shards decided for", "short", "",
            ("sum(corefleet_shards)", "decided for"),
            ("max(corefleet_shards_configured)", "there are"),
            ("max by (kind) (corefleet_unowned_units)", "{{kind}}s without owner"),
        ),
        _panel(
            "Shards and racks won", "short", "By the controlds that run: from the dead, or free.",
            ("sum by (kind, source) (corefleet_units_won_total)", "{{kind}} {{source}}"),
        ),
        _panel(
            "Time of a take-over", "s", "From owning a shard until deciding for it; mean.",
            (
                "sum(corefleet_takeover_seconds_sum) / sum(corefleet_takeover_seconds_count)",
                "mean since the start",
            ),
        ),
        _panel(
            "Verdicts on nodes", "short", "Within the interval; `held`: now.",
            (f"sum by (state) (increase(corefleet_verdicts_total[{RATE}]))", "{{state}}"),
            (f"sum(increase(corefleet_false_suspicions_total[{RATE}]))", "false suspicions"),
            ("max(corefleet_held_nodes)", "held"),
        ),
        _panel(
            "Silence at a verdict", "s", "Mean since the start.",
            (
                (
                    "sum(corefleet_verdict_silence_seconds_sum) "
                    "/ (sum(corefleet_verdict_silence_seconds_count) > 0)"
                ),
                "mean",
            ),
        ),
        _panel(
            "Time between heartbeats", "s", "As heard; sent each 0.2 s, 0.45 s is a suspicion.",
            (_quantile(0.5, "corefleet_beat_gap_seconds"), "p50"),
            (_quantile(0.99, "corefleet_beat_gap_seconds"), "p99"),
        ),
        _panel(
            "Clocks against controlds'", "s", "Of the node that is off most.",
            ("max(corefleet_fleet_clock_offset_max_seconds)", "largest offset"),
        ),
        _panel(
            "Attempts moved", "short", "Given up by the controlds that run, in all, by why.",
            ("sum by (cause) (corefleet_requeues_total)", "{{cause}}"),
        ),
        _panel(
            "Writes that lost their fence", "ops", "An older owner's write was refused.",
            (f"sum(rate(corefleet_fenced_writes_total[{RATE}]))", "fenced"),
        ),
    ),
)  # fmt: skip

DASHBOARDS = (FLEET, NODE, POOL, QUALITY, TAKEOVERS)
