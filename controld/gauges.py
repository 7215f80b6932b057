"""What a controld counts and times, by name."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from controld.core.overview import Tallies
from corefleet.metrics import Family, Metrics

_SILENCE_BUCKETS_S = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
DECISION_BUCKETS_S = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001),
    *(0.002, 0.005, 0.01, 0.02, 0.05, 0.2),
)


@dataclass(frozen=True, slots=True)
class Gauges:
    """All metrics of a controld."""

    submissions: Family[Counter]
    refused: Family[Counter]
    not_admitted: Family[Counter]
    quota_share: Family[Gauge]
    shed_batch: Family[Gauge]
    online_limit: Family[Gauge]
    submit_s: Family[Histogram]
    tallies: Tallies
    placed: Family[Counter]
    affinity: Family[Counter]
    finished: Family[Counter]
    requeued: Family[Counter]
    queue_wait_s: Family[Histogram]
    decision_s: Family[Histogram]
    yields: Family[Counter]
    broken_cores: Family[Counter]
    ended: Family[Counter]
    units_won: Family[Counter]
    units_left: Family[Counter]
    balance: Family[Gauge]
    pool_balance: Family[Gauge]
    nodes: Family[Gauge]
    lost_races: Family[Counter]
    assignments: Family[Counter]
    takeover_s: Family[Histogram]
    shards: Family[Gauge]
    loop_lag_s: Family[Gauge]
    expelled: Family[Counter]
    false_suspicions: Family[Counter]
    verdicts: Family[Counter]
    silence_s: Family[Histogram]
    looks: Family[Counter]
    held_nodes: Family[Gauge]


def make_gauges(metrics: Metrics) -> Gauges:
    """Make all families, once a process."""
    return Gauges(
        submissions=metrics.counter(
            "corefleet_submissions", "Accepted submissions.", ["pool", "duplicate"]
        ),
        refused=metrics.counter("corefleet_refusals", "Refused submissions.", ["error"]),
        not_admitted=metrics.counter(
            "corefleet_not_admitted", "Submissions over a limit, by the limit.", ["pool", "cause"]
        ),
        quota_share=metrics.gauge(
            "corefleet_quota_share", "What this controld may spend of a shared quota.", ["quota"]
        ),
        shed_batch=metrics.gauge(
            "corefleet_batch_shed_share", "Share of batch submissions shed for want of CPU."
        ),
        online_limit=metrics.gauge(
            "corefleet_online_limit_per_second",
            "Online submissions a second that the CPU allows; 0 is no limit.",
        ),
        submit_s=metrics.histogram("corefleet_submit_seconds", "Time until a task is durable."),
        tallies=Tallies(),
        placed=metrics.counter("corefleet_placements", "Attempts placed.", ["pool"]),
        affinity=metrics.counter(
            "corefleet_affinity",
            "Placements by what they did to the session's home: hit, moved, missed, new.",
            ["pool", "home"],
        ),
        finished=metrics.counter(
            "corefleet_tasks_ended", "Tasks of our shards that ended.", ["pool", "state"]
        ),
        units_won=metrics.counter(
            "corefleet_units_won",
            "Shards and racks won: from the dead, or free ones.",
            ["kind", "source"],
        ),
        units_left=metrics.counter(
            "corefleet_units_left",
            "Shards and racks no longer ours: given to their rightful owner, or lost.",
            ["kind", "reason"],
        ),
        balance=metrics.gauge(
            "corefleet_balance_variation",
            "Coefficient of variation, over serving nodes, of the share of places in use.",
        ),
        pool_balance=metrics.gauge(
            "corefleet_pool_balance_variation", "The same for the places of one pool.", ["pool"]
        ),
        nodes=metrics.gauge("corefleet_nodes", "Nodes by state.", ["state"]),
        requeued=metrics.counter(
            "corefleet_requeues", "Attempts given up, by why.", ["pool", "cause"]
        ),
        queue_wait_s=metrics.histogram(
            "corefleet_queue_wait_seconds", "From a task's creation to its first place.", ["pool"]
        ),
        decision_s=metrics.histogram(
            "corefleet_decision_seconds",
            "Time of the shard's core for one placement, its write and offer apart.",
            buckets=DECISION_BUCKETS_S,
        ),
        yields=metrics.counter(
            "corefleet_yields_asked", "Attempts that nodes were asked to give back."
        ),
        broken_cores=metrics.counter(
            "corefleet_broken_cores", "Shards stopped and rebuilt because their core was wrong."
        ),
        ended=metrics.counter("corefleet_owner_ends", "Tasks ended by their owner.", ["state"]),
        lost_races=metrics.counter(
            "corefleet_fenced_writes", "Writes of ours that lost the compare-and-set."
        ),
        assignments=metrics.counter(
            "corefleet_assignments", "Assignments by what the node said.", ["answer"]
        ),
        takeover_s=metrics.histogram(
            "corefleet_takeover_seconds", "Time from owning a shard until deciding for it."
        ),
        shards=metrics.gauge("corefleet_shards", "Shards that this controld decides for."),
        expelled=metrics.counter(
            "corefleet_peers_expelled", "Dead peers whose registration this controld removed."
        ),
        loop_lag_s=metrics.gauge(
            "corefleet_loop_lag_seconds", "How late the event loop's newest timer was."
        ),
        false_suspicions=metrics.counter(
            "corefleet_false_suspicions", "Silent nodes that beat again before any verdict."
        ),
        verdicts=metrics.counter(
            "corefleet_verdicts", "Verdicts given on nodes of our racks.", ["state"]
        ),
        silence_s=metrics.histogram(
            "corefleet_verdict_silence_seconds",
            "How long a node had been silent at its verdict.",
            buckets=_SILENCE_BUCKETS_S,
        ),
        looks=metrics.counter(
            "corefleet_looks",
            "Looks at silent nodes, by who looked (own, second, for_peer) and what was found.",
            ["by", "found"],
        ),
        held_nodes=metrics.gauge(
            "corefleet_held_nodes", "Nodes found lost whose requeueing is held as a mass loss."
        ),
    )
