"""Prometheus metrics that every process has."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diloco_shared.edges.bus import Traffic
from diloco_shared.protocol.records import MemberRecord


def traffic_metrics(planes: Mapping[str, Traffic]) -> Iterator[Metric]:
    """Bytes per plane and way: payloads, and all that crossed the sockets; what was refused."""
    payload = CounterMetricFamily(
        "diloco_bus_bytes", "Payload bytes at this process's bus", labels=["plane", "way"]
    )
    socket = CounterMetricFamily(
        "diloco_socket_bytes",
        "Bytes at this process's sockets to the bus: payloads, protocol, repeats",
        labels=["plane", "way"],
    )
    refused = CounterMetricFamily(
        "diloco_bus_refused",
        "Chunks, manifests and messages that came to this process and were not taken",
        labels=["plane", "what", "reason"],
    )
    for plane, traffic in planes.items():
        for (what, reason), count in sorted(traffic.refused.copy().items()):
            refused.add_metric([plane, what, reason], count)
        payload.add_metric([plane, "out"], traffic.bytes_out)
        payload.add_metric([plane, "in"], traffic.bytes_in)
        socket.add_metric([plane, "out"], traffic.socket_bytes_out)
        socket.add_metric([plane, "in"], traffic.socket_bytes_in)
    yield payload
    yield socket
    yield refused


def disk_metric(*members: MemberRecord) -> Metric:
    """Whether the own disk of these members takes what they keep for their restarts."""
    full = GaugeMetricFamily(
        "diloco_disk_full", "1: a member's own disk takes nothing more", labels=["run", "member"]
    )
    for member in members:
        full.add_metric([member.run, member.id], float(bool(member.full)))
    return full
