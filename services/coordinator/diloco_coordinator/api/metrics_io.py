"""Prometheus metrics of the whole cluster, read off the registry when asked for."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diloco_coordinator.access import TokenRecord, sees
from diloco_coordinator.api.look_io import Look
from diloco_coordinator.api.views import standing
from diloco_coordinator.exports.exporting_io import Exports
from diloco_coordinator.runs.budgets import used
from diloco_coordinator.runs.registry_io import Registry
from diloco_coordinator.runs.statuses import shards_of
from diloco_shared import ambient
from diloco_shared.process.health import disk_metric, speed_metrics
from diloco_shared.process.loop_watch import LoopWatch
from diloco_shared.protocol.records import MemberRecord, RunRecord
from diloco_shared.protocol.run_states import OVER, over
from diloco_shared.protocol.subjects import status_key

_COUNTERS = {
    "rounds_committed": "Rounds committed",
    "rounds_skipped": "Rounds skipped",
    "contributions_merged": "Contributions merged",
    "tokens_processed": "Tokens that learners trained on",
    "tokens_useful": "Tokens that were merged",
    "bytes_up": "Bytes of contributions",
    "bytes_down": "Bytes of publications, counted once per reader",
}


# Why a contribution is refused that an alert asks for: see the gate of the syncer.
REFUSALS = ("non-finite",)


class _Counted:
    """Evaluations that failed, by run. Events themselves are let go of after a while."""

    def __init__(self) -> None:
        self._failed: Counter[str] = Counter()
        self._lost, self._newest = 0, 0

    def up_to_now(self, registry: Registry) -> Counter[str]:
        """With those that were told since it was asked last."""
        told = registry.told
        if self._lost != told.lost:  # other events have the sequences that were counted
            self._lost, self._newest = told.lost, min(self._newest, told.again_from - 1)
        for seq, event in told.after(self._newest):
            self._newest = seq
            self._failed[event.run] += event.kind == "evaluation-failed"
        for run in self._failed.keys() - registry.runs.keys():
            del self._failed[run]
        return self._failed


class _Limited:
    """Of what another collector tells, that which is of runs that a token may see."""

    def __init__(self, whole: "ClusterMetrics", token: TokenRecord) -> None:
        self.whole = whole
        self.token = token

    def collect(self) -> Iterator[Metric]:
        for metric in self.whole.collect():
            runs = [sample.labels.get("run", "") for sample in metric.samples]
            metric.samples = [
                sample
                for sample, run in zip(metric.samples, runs, strict=True)
                if run and sees(self.token, run)
            ]
            if metric.samples:
                yield metric


class ClusterMetrics:
    """A collector over one registry; `requests` counts (method, status class)."""

    def __init__(
        self,
        registry: Registry,
        requests: Counter[tuple[str, str]],
        loop_watch: LoopWatch | None = None,
        exports: Exports | None = None,
    ) -> None:
        self.registry = registry
        self.exports = exports
        self.requests = requests
        self.loop_watch = loop_watch
        self._counted = _Counted()
        self.collectors = CollectorRegistry()
        self.collectors.register(self)

    def text(self, token: TokenRecord | None = None) -> bytes:
        """Prometheus exposition format; for a token that is limited to runs, of those alone."""
        if token is None or not token.runs:
            return generate_latest(self.collectors)
        limited = CollectorRegistry()
        limited.register(_Limited(self, token))
        return generate_latest(limited)

    def collect(self) -> Iterator[Metric]:
        """All families of metrics, as they are now: prometheus_client calls it at each scrape."""
        look = Look(self.registry)
        states = {name: self._state(record, look) for name, record in self.registry.runs.items()}
        yield from self._members()
        yield GaugeMetricFamily(
            "diloco_hub_connected",
            "1: the coordinator has its connection to the message server",
            float(self.registry.bus.connected),
        )
        yield disk_metric(*self.registry.roll.living.values())
        if self.loop_watch is not None:
            yield from self.loop_watch.metrics()
        yield from self._runs(states, look)
        yield self._exports()
        yield from self._budgets(states)
        yield from self._statuses()
        yield self._failed_evaluations()
        yield from self._val_losses()
        told = (self.registry.speed_of(learner) for learner in self.registry.roll.living)
        yield from speed_metrics(*(speed for speed in told if speed is not None))
        requests = CounterMetricFamily(
            "diloco_http_requests", "Requests answered", labels=["method", "status"]
        )
        for labels, count in sorted(self.requests.items()):
            requests.add_metric(labels, count)
        yield requests

    def _members(self) -> Iterator[Metric]:
        there = GaugeMetricFamily(
            "diloco_members",
            "Living members, as last heard of: nothing new is while diloco_hub_connected is 0",
            labels=["role"],
        )
        gone = GaugeMetricFamily(
            "diloco_members_gone",
            "Members that are gone, were not drained and are not forgotten yet",
            labels=["role"],
        )
        notes = self.registry.roll.notes.values()
        living = Counter(n.record.role for n in notes if n.alive)
        lost = Counter(n.record.role for n in notes if not n.alive and not n.draining)
        for role in ("learner", "syncer", "coordinator", "supervisor"):
            there.add_metric([role], living[role])
            gone.add_metric([role], lost[role])
        yield from (there, gone)

    def _budgets(self, states: Mapping[str, str]) -> Iterator[Metric]:
        """Used and budget side by side, so that a rule may divide them; of runs that go on.

        What the streams of one that is over hold nobody makes more of, until it is deleted.
        """
        memory = GaugeMetricFamily(
            "diloco_memory_bytes", "Anonymous memory of a member", labels=["run", "member"]
        )
        may = GaugeMetricFamily(
            "diloco_memory_budget_bytes", "What its run allows it", labels=["run", "member"]
        )
        held = GaugeMetricFamily(
            "diloco_stream_bytes", "What a stream holds", labels=["run", "stream"]
        )
        limit = GaugeMetricFamily(
            "diloco_stream_limit_bytes", "What it may hold", labels=["run", "stream"]
        )
        r = self.registry
        here: dict[str, list[MemberRecord]] = {}
        for member_record in r.roll.living.values():
            here.setdefault(member_record.run, []).append(member_record)
        for name, record in r.runs.items():
            if states[name] in OVER:
                continue
            budget = used(record, r.statuses.get(name), here.get(name, ()))
            budget = budget or {"memory": {}, "streams": {}}
            for member, of_member in budget["memory"].items():
                memory.add_metric([name, member], of_member["used"] or 0)
                may.add_metric([name, member], of_member["budget"])
            for kind, of_stream in budget["streams"].items():
                if of_stream["used"] is not None:
                    held.add_metric([name, kind], of_stream["used"])
                    limit.add_metric([name, kind], of_stream["limit"])
        yield from (memory, may, held, limit)

    def _runs(self, states: Mapping[str, str], look: Look) -> Iterator[Metric]:
        runs = GaugeMetricFamily("diloco_runs", "Runs by state", labels=["state"])
        each = GaugeMetricFamily(
            "diloco_run_state", "1: the run is in this state", labels=["run", "state"]
        )
        syncers = GaugeMetricFamily(
            "diloco_syncers_alive",
            "Living syncers of each shard of a run that goes on",
            labels=["run", "shard"],
        )
        for state, count in sorted(Counter(states.values()).items()):
            runs.add_metric([state], count)
        for name, state in states.items():
            each.add_metric([name, state], 1)
            if state in ("queued", *OVER):
                continue  # nobody works for it, or need do so any more
            record = self.registry.runs[name]
            alive = Counter(s["shard"] for s in look.syncers(name) if s["state"] != "gone")
            for shard in range(shards_of(record)):
                syncers.add_metric([name, str(shard)], alive[shard])
        yield from (runs, each, syncers)

    def _exports(self) -> Metric:
        """Of runs that are there: an export that failed long ago may be of none that is."""
        failed = GaugeMetricFamily(
            "diloco_export_failed",
            "1: the newest export of the run failed, or none can begin",
            labels=["run"],
        )
        for name, record in self.registry.runs.items():
            if self.exports is not None:
                failed.add_metric([name], float(self.exports.failing(record)))
        return failed

    def _state(self, record: RunRecord, look: Look) -> str:
        run = record.name
        status, wordless_s = self.registry.statuses.get(run), self.registry.wordless_s(run)
        return standing(record, status, look.members(run), look.syncers(run), wordless_s)[0]

    def _silent_s(self, run: str) -> float:
        """A leader that is gone does not say how long ago its newest round was: of the shards that
        go on, that whose leader has been silent the longest."""
        record, standings = self.registry.runs.get(run), self.registry.standings
        if record is None:
            return 0.0
        going_on = [
            shard
            for shard in range(shards_of(record))
            if (there := standings.of_shard(record, shard)) is not None and not over(there)
        ]
        now = ambient.monotonic()
        silent_s = (standings.silent_s(status_key(run, shard), now) for shard in going_on)
        return max((s for s in silent_s if math.isfinite(s)), default=0.0)

    def _statuses(self) -> Iterator[Metric]:
        statuses = self.registry.statuses
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"diloco_{name}", text, labels=["run"])
            for run, status in statuses.items():
                counter.add_metric([run], getattr(status, name))
            yield counter
        refused = CounterMetricFamily("diloco_refused", "Refused input", labels=["run", "reason"])
        alive = GaugeMetricFamily("diloco_learners_alive", "Heartbeats seen", labels=["run"])
        taking_part = GaugeMetricFamily(
            "diloco_learners_participating", "Merged within the last H rounds", labels=["run"]
        )
        stuck = GaugeMetricFamily("diloco_stuck", "No progress, no reason known", labels=["run"])
        since = GaugeMetricFamily(
            "diloco_seconds_since_round", "Since a round closed", labels=["run"]
        )
        # A counter that begins with its first count has no increase then: it is there before. But
        # not before what was counted is known, which would be an increase.
        known = self.registry.runs if self.registry.ready else ()
        counts = {run: {reason: 0 for reason in REFUSALS} for run in known}
        for run, status in statuses.items():
            counts[run] = {**counts.get(run, {}), **status.refused}
            stuck.add_metric([run], status.state == "stuck")
            if not over(status):
                since.add_metric([run], status.since_round_s + self._silent_s(run))
            alive.add_metric([run], len(status.alive))
            taking_part.add_metric([run], len(status.participating))
        for run, by_reason in counts.items():
            for reason, count in by_reason.items():
                refused.add_metric([run, reason], count)
        yield from (refused, alive, taking_part, stuck, since, *self._ledger())

    def _failed_evaluations(self) -> Metric:
        failed = CounterMetricFamily(
            "diloco_evaluations_failed",
            "Evaluations that failed, since the coordinator began or as far back as it knows",
            labels=["run"],
        )
        counted = self._counted.up_to_now(self.registry)
        for run in self.registry.runs:
            failed.add_metric([run], counted[run])
        return failed

    def _ledger(self) -> Iterator[Metric]:
        """Gauges: a token may move on, from in flight to merged for one."""
        tokens = GaugeMetricFamily(
            "diloco_tokens", "Tokens processed, by what became of them", labels=["run", "became"]
        )
        reread = GaugeMetricFamily(
            "diloco_tokens_reread", "Tokens read again since their reader is gone", labels=["run"]
        )
        for run, status in self.registry.statuses.items():
            for became, count in status.tokens.model_dump().items():
                tokens.add_metric([run, became], count)
            reread.add_metric([run], status.tokens_reread)
        yield from (tokens, reread)

    def _val_losses(self) -> Iterator[Metric]:
        loss = GaugeMetricFamily("diloco_val_loss", "Newest validation loss", labels=["run"])
        per_corpus = GaugeMetricFamily(
            "diloco_val_loss_by_corpus",
            "Newest validation loss on each corpus of a mixture",
            labels=["run", "corpus"],
        )
        newest = {e.run: e.data for _, e in self.registry.events if e.kind == "evaluation"}
        for run, data in newest.items():
            if isinstance(value := data.get("val_loss"), float):
                loss.add_metric([run], value)
            each = data.get("each")
            for corpus, value in each.items() if isinstance(each, dict) else ():
                if isinstance(value, float):
                    per_corpus.add_metric([run, corpus], value)
        yield from (loss, per_corpus)
