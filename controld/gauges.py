"""What a controld counts and times, by name."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from corefleet.metrics import Family, Metrics


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
    placed: Family[Counter]
    requeued: Family[Counter]
    ended: Family[Counter]
    lost_races: Family[Counter]
    assignments: Family[Counter]
    takeover_s: Family[Histogram]
    shards: Family[Gauge]
    loop_lag_s: Family[Gauge]
    expelled: Family[Counter]


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
        placed=metrics.counter("corefleet_placements", "Attempts placed.", ["pool"]),
        requeued=metrics.counter("corefleet_requeues", "Attempts given up.", ["pool"]),
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
    )
