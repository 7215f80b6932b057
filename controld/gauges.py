"""What a controld counts and times, by name."""

from __future__ import annotations

from controld.core.beat_meter import BeatMeter
from controld.core.overview import Tallies
from corefleet.metrics import Metrics

_SILENCE_BUCKETS_S = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.9, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_LATE_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_GAP_BUCKETS_S = (0.1, 0.15, 0.19, 0.21, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.65, 1.0, 2.0, 5.0)
DECISION_BUCKETS_S = (
    *(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001),
    *(0.002, 0.005, 0.01, 0.02, 0.05, 0.2),
)


class AdmissionGauges:
    """Of submissions."""

    def __init__(self, metrics: Metrics) -> None:
        self.submissions = metrics.counter(
            "corefleet_submissions", "Accepted submissions.", ["pool", "duplicate"]
        )
        self.refused = metrics.counter("corefleet_refusals", "Refused submissions.", ["error"])
        self.not_admitted = metrics.counter(
            "corefleet_not_admitted", "Submissions over a limit, by the limit.", ["pool", "cause"]
        )
        self.quota_rate = metrics.gauge(
            "corefleet_quota_tasks_per_second",
            "Submissions a second that this controld may accept of a pool's shared rate.",
            ["pool"],
        )
        self.quota_places = metrics.gauge(
            "corefleet_quota_places",
            "Places that this controld's tasks may use of a pool's shared limit.",
            ["pool"],
        )
        self.shed_batch = metrics.gauge(
            "corefleet_batch_shed_ratio", "Share of batch submissions shed for want of CPU."
        )
        self.online_limit = metrics.gauge(
            "corefleet_online_limit_per_second",
            "Online submissions a second that the CPU allows; 0 is no limit.",
        )
        self.stream_used = metrics.gauge(
            "corefleet_stream_used_ratio",
            "Share of its size limit that the fullest stream uses; submissions are refused "
            "from 0.8 on.",
        )
        self.submit_s = metrics.histogram(
            "corefleet_submit_seconds", "Time until a task is durable."
        )


class PlacementGauges:
    """Of queues, placements and attempts."""

    def __init__(self, metrics: Metrics) -> None:
        self.tallies = Tallies()
        self.placed = metrics.counter("corefleet_placements", "Attempts placed.", ["pool"])
        self.affinity = metrics.counter(
            "corefleet_affinity",
            "Placements by what they did to the session's home: hit, moved, missed, new.",
            ["pool", "home"],
        )
        self.requeued = metrics.counter(
            "corefleet_requeues", "Attempts given up, by why.", ["pool", "cause"]
        )
        self.queue_wait_s = metrics.histogram(
            "corefleet_queue_wait_seconds", "From a task's creation to its first place.", ["pool"]
        )
        self.decision_s = metrics.histogram(
            "corefleet_decision_seconds",
            "Time of the shard's core for one placement, its write and offer apart.",
            buckets=DECISION_BUCKETS_S,
        )
        self.assignments = metrics.counter(
            "corefleet_assignments", "Assignments by what the node said.", ["answer"]
        )
        self.yields = metrics.counter(
            "corefleet_yields_asked", "Attempts that nodes were asked to give back."
        )
        self.queued = metrics.gauge(
            "corefleet_queued_tasks", "Tasks of our shards that wait for a place.", ["pool"]
        )
        self.in_flight = metrics.gauge(
            "corefleet_in_flight_tasks", "Tasks of our shards that have a place.", ["pool"]
        )
        self.balance = metrics.gauge(
            "corefleet_balance_variation_ratio",
            "Coefficient of variation, over serving nodes, of the share of places in use.",
        )
        self.pool_balance = metrics.gauge(
            "corefleet_pool_balance_variation_ratio",
            "The same, for the places of one pool.",
            ["pool"],
        )


class ShardGauges:
    """Of shards, what ends in them, and who owns them."""

    def __init__(self, metrics: Metrics) -> None:
        self.finished = metrics.counter(
            "corefleet_tasks_ended", "Tasks of our shards that ended.", ["pool", "state"]
        )
        self.ended = metrics.counter(
            "corefleet_owner_ends", "Tasks ended by their owner.", ["state"]
        )
        self.lost_races = metrics.counter(
            "corefleet_fenced_writes", "Writes of ours that lost the compare-and-set."
        )
        self.broken_cores = metrics.counter(
            "corefleet_broken_cores", "Shards stopped and rebuilt because their core was wrong."
        )
        self.takeover_s = metrics.histogram(
            "corefleet_takeover_seconds", "Time from owning a shard until deciding for it."
        )
        self.shards = metrics.gauge("corefleet_shards", "Shards that this controld decides for.")
        self.shards_configured = metrics.gauge(
            "corefleet_shards_configured", "Shards that the cluster has."
        )
        self.unowned = metrics.gauge(
            "corefleet_unowned_units",
            "Shards, and racks with nodes, that no registered controld owns, as seen from here.",
            ["kind"],
        )
        self.controlds = metrics.gauge(
            "corefleet_controlds", "Registered controlds, as seen from here."
        )
        self.may_act = metrics.gauge(
            "corefleet_may_act", "1 while this controld's lease in etcd lets it decide."
        )
        self.nats_connected = metrics.gauge(
            "corefleet_nats_connected", "1 while connected to NATS.", ["use"]
        )
        self.units_won = metrics.counter(
            "corefleet_units_won",
            "Shards and racks won: from the dead, or free ones.",
            ["kind", "source"],
        )
        self.units_left = metrics.counter(
            "corefleet_units_left",
            "Shards and racks no longer ours: given to their rightful owner, or lost.",
            ["kind", "reason"],
        )
        self.expelled = metrics.counter(
            "corefleet_peers_expelled", "Dead peers whose registration this controld removed."
        )
        self.loop_lag_s = metrics.gauge(
            "corefleet_loop_lag_seconds", "How late the event loop's newest timer was."
        )
        self.timer_late_s = metrics.histogram(
            "corefleet_timer_lateness_seconds",
            "How late timers of the event loop were, 20 of them a second.",
            buckets=_LATE_BUCKETS_S,
        )


class LivenessGauges:
    """Of nodes."""

    def __init__(self, metrics: Metrics) -> None:
        self.nodes = metrics.gauge("corefleet_nodes", "Nodes by state.", ["state"])
        self.false_suspicions = metrics.counter(
            "corefleet_false_suspicions", "Silent nodes that beat again before any verdict."
        )
        self.verdicts = metrics.counter(
            "corefleet_verdicts", "Verdicts given on nodes of our racks.", ["state"]
        )
        for state in ("lost", "cut"):  # from the start: an increase from nothing is not seen
            self.verdicts(state)
        self.silence_s = metrics.histogram(
            "corefleet_verdict_silence_seconds",
            "How long a node had been silent at its verdict.",
            buckets=_SILENCE_BUCKETS_S,
        )
        self.beats = metrics.counter("corefleet_beats", "Heartbeats of nodes of our racks.")
        self.beat_gap_s = metrics.histogram(
            "corefleet_beat_gap_seconds",
            "Time between two heartbeats of a node as heard here; one pair in 16 is measured.",
            buckets=_GAP_BUCKETS_S,
        )
        self.clock_offset_s = metrics.gauge(
            "corefleet_fleet_clock_offset_max_seconds",
            "Largest offset of a clock among nodes of our racks against ours, by their beats.",
        )
        self.looks = metrics.counter(
            "corefleet_looks",
            "Looks at silent nodes, by who looked (own, second, for_peer) and what was found.",
            ["by", "found"],
        )
        self.held_nodes = metrics.gauge(
            "corefleet_held_nodes", "Nodes found lost whose requeueing is held as a mass loss."
        )


class Gauges(AdmissionGauges, PlacementGauges, ShardGauges, LivenessGauges):
    """All metrics of a controld."""

    def __init__(self, metrics: Metrics) -> None:
        AdmissionGauges.__init__(self, metrics)
        PlacementGauges.__init__(self, metrics)
        ShardGauges.__init__(self, metrics)
        LivenessGauges.__init__(self, metrics)
        self.beat_meter = BeatMeter()


def make_gauges(metrics: Metrics) -> Gauges:
    """Make all families, once a process."""
    return Gauges(metrics)
