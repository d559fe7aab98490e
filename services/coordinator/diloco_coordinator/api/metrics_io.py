"""Prometheus metrics of the whole cluster, read off the registry when asked for."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diloco_coordinator.access import TokenRecord, sees
from diloco_coordinator.api.views import standing, syncer_views
from diloco_coordinator.exports.exporting_io import Exports
from diloco_coordinator.runs.budgets import used
from diloco_coordinator.runs.registry_io import Registry
from diloco_coordinator.runs.statuses import shards_of
from diloco_shared import ambient
from diloco_shared.process.health import disk_metric, speed_metrics
from diloco_shared.process.loop_watch import LoopWatch
from diloco_shared.protocol.records import RunRecord
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
        members = GaugeMetricFamily("diloco_members", "Living members", labels=["role"])
        roles = Counter(record.role for record in self.registry.roll.living.values())
        for role in ("learner", "syncer", "coordinator", "supervisor"):
            members.add_metric([role], roles[role])
        yield members
        yield GaugeMetricFamily(
            "diloco_hub_connected",
            "1: the coordinator has its connection to the message server",
            float(self.registry.bus.connected),
        )
        yield disk_metric(*self.registry.roll.living.values())
        if self.loop_watch is not None:
            yield from self.loop_watch.metrics()
        yield from self._runs()
        yield self._exports()
        yield from self._budgets()
        yield from self._statuses()
        yield from self._val_losses()
        told = (self.registry.speed_of(learner) for learner in self.registry.roll.living)
        yield from speed_metrics(*(speed for speed in told if speed is not None))
        requests = CounterMetricFamily(
            "diloco_http_requests", "Requests answered", labels=["method", "status"]
        )
        for labels, count in sorted(self.requests.items()):
            requests.add_metric(labels, count)
        yield requests

    def _budgets(self) -> Iterator[Metric]:
        """Used and budget side by side, so that a rule may divide them."""
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
        for name, record in r.runs.items():
            here = [n.record for n in r.roll.notes.values() if n.alive and n.record.run == name]
            budget = used(record, r.statuses.get(name), here) or {"memory": {}, "streams": {}}
            for member, of_member in budget["memory"].items():
                memory.add_metric([name, member], of_member["used"] or 0)
                may.add_metric([name, member], of_member["budget"])
            for kind, of_stream in budget["streams"].items():
                if of_stream["used"] is not None:
                    held.add_metric([name, kind], of_stream["used"])
                    limit.add_metric([name, kind], of_stream["limit"])
        yield from (memory, may, held, limit)

    def _runs(self) -> Iterator[Metric]:
        runs = GaugeMetricFamily("diloco_runs", "Runs by state", labels=["state"])
        each = GaugeMetricFamily(
            "diloco_run_state", "1: the run is in this state", labels=["run", "state"]
        )
        syncers = GaugeMetricFamily(
            "diloco_syncers_alive",
            "Living syncers of each shard of a run that goes on",
            labels=["run", "shard"],
        )
        states = {name: self._state(record) for name, record in self.registry.runs.items()}
        for state, count in sorted(Counter(states.values()).items()):
            runs.add_metric([state], count)
        for name, state in states.items():
            each.add_metric([name, state], 1)
            if state in ("queued", *OVER):
                continue  # nobody works for it, or need do so any more
            record = self.registry.runs[name]
            alive = Counter(s["shard"] for s in self._syncers(record) if s["state"] != "gone")
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

    def _members(self, record: RunRecord) -> list[str]:
        return [m for m, run in self.registry.assigned.items() if run == record.name]

    def _syncers(self, record: RunRecord) -> list[dict[str, Any]]:
        notes = self.registry.roll.notes
        return syncer_views(notes[m] for m in self._members(record) if m in notes)

    def _state(self, record: RunRecord) -> str:
        status = self.registry.statuses.get(record.name)
        wordless_s = self.registry.wordless_s(record.name)
        members, syncers = self._members(record), self._syncers(record)
        return standing(record, status, members, syncers, wordless_s)[0]

    def _silent_s(self, run: str, shard: int) -> float:
        """A leader that is gone does not say how long ago its newest round was."""
        silent_s = self.registry.standings.silent_s(status_key(run, shard), ambient.monotonic())
        return silent_s if math.isfinite(silent_s) else 0.0

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
        for run, status in statuses.items():
            stuck.add_metric([run], status.state == "stuck")
            if not over(status):
                since.add_metric([run], status.since_round_s + self._silent_s(run, status.shard))
            for reason, count in status.refused.items():
                refused.add_metric([run, reason], count)
            alive.add_metric([run], len(status.alive))
            taking_part.add_metric([run], len(status.participating))
        yield from (refused, alive, taking_part, stuck, since, *self._ledger())

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
