"""Prometheus metrics of the whole cluster, read off the registry when asked for."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diloco_coordinator.edges.registry import Registry

_COUNTERS = {
    "rounds_committed": "Rounds committed",
    "rounds_skipped": "Rounds skipped",
    "contributions_merged": "Contributions merged",
    "tokens_processed": "Tokens that learners trained on",
    "tokens_useful": "Tokens that were merged",
    "bytes_up": "Bytes of contributions",
    "bytes_down": "Bytes of publications, counted once per reader",
}


class ClusterMetrics:
    """A collector over one registry."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.collectors = CollectorRegistry()
        self.collectors.register(self)

    def text(self) -> bytes:
        """Prometheus exposition format."""
        return generate_latest(self.collectors)

    def collect(self) -> Iterator[Metric]:
        members = GaugeMetricFamily("diloco_members", "Living members", labels=["role"])
        for role in ("learner", "syncer", "coordinator", "supervisor"):
            living = [m for m in self.registry.members.values() if m.role == role]
            members.add_metric([role], len(living))
        yield members
        statuses = self.registry.statuses
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"diloco_{name}", text, labels=["run"])
            for run, status in statuses.items():
                counter.add_metric([run], getattr(status, name))
            yield counter
        refused = CounterMetricFamily("diloco_refused", "Refused input", labels=["run", "kind"])
        alive = GaugeMetricFamily("diloco_learners_alive", "Heartbeats seen", labels=["run"])
        taking_part = GaugeMetricFamily(
            "diloco_learners_participating", "Merged within the last H rounds", labels=["run"]
        )
        for run, status in statuses.items():
            for kind, count in status.refused.items():
                refused.add_metric([run, kind], count)
            alive.add_metric([run], len(status.alive))
            taking_part.add_metric([run], len(status.participating))
        yield from (refused, alive, taking_part)
        loss = GaugeMetricFamily("diloco_val_loss", "Newest validation loss", labels=["run"])
        newest = {
            e.run: e.data.get("val_loss") for _, e in self.registry.events if e.kind == "evaluation"
        }
        for run, value in newest.items():
            if isinstance(value, float):
                loss.add_metric([run], value)
        yield loss
