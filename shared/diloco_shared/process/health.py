"""/healthz, /readyz and /metrics of a process that has no web framework.

A few lines of HTTP/1.1 for GET, loopback unless told otherwise; nothing here changes anything.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from diloco_shared.bus.port import Bus, Traffic
from diloco_shared.process.set_up import cannot_listen
from diloco_shared.protocol.records import LearnerSpeed, MemberRecord

# A request line with its headers is far smaller; a client that sends more is not ours.
REQUEST_BYTES_MAX = 8192
REQUEST_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Health:
    """What a probe is told: whether it is `ready`, with the reasons. Who answers is alive."""

    ready: bool
    detail: dict[str, Any]


def bus_state(bus: Bus) -> str:
    """What a probe is told of the bus: that it is there, that it is away, or what ails the hub."""
    return bus.ails or ("connected" if bus.connected else "away")


class HealthServer:
    """Serves the three paths until closed."""

    def __init__(self, look: Callable[[], Health], registry: CollectorRegistry) -> None:
        self.look = look
        self.registry = registry
        self.server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port (a free one for 0). AddressTaken says what to do."""
        limit = REQUEST_BYTES_MAX
        try:
            self.server = await asyncio.start_server(self._serve, host, port, limit=limit)
        except OSError as error:
            raise cannot_listen(host, port, error, "DILOCO_HEALTH_PORT") from None
        bound: int = self.server.sockets[0].getsockname()[1]
        return bound

    async def start_on(self, bound: socket.socket) -> None:
        """Listen on a socket that is bound."""
        self.server = await asyncio.start_server(self._serve, sock=bound, limit=REQUEST_BYTES_MAX)

    async def close(self) -> None:
        if self.server is not None:
            self.server.close()
            await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                line = head.split(b"\r\n", 1)[0].decode("latin-1")
                status, kind, body = self._answer(line)
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}"
                    "\r\nConnection: close\r\n\r\n".encode()
                    + (b"" if line.startswith("HEAD ") else body)
                )
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # a probe that went away or never was one
        finally:
            writer.close()

    def _answer(self, request_line: str) -> tuple[str, str, bytes]:
        method, _, rest = request_line.partition(" ")
        path = rest.split(" ")[0].split("?")[0]
        if method not in ("GET", "HEAD"):
            return "405 Method Not Allowed", "text/plain", b"GET or HEAD only\n"
        if path == "/metrics":
            return "200 OK", "text/plain; version=0.0.4", generate_latest(self.registry)
        if path not in ("/healthz", "/readyz"):
            return "404 Not Found", "text/plain", b"try /healthz, /readyz or /metrics\n"
        health = self.look()
        good = health.ready or path == "/healthz"
        status = "200 OK" if good else "503 Service Unavailable"
        return status, "application/json", json.dumps(health.detail).encode() + b"\n"


# --------------------------------------------------------------------------------------------------
# Prometheus metrics that every process has.


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


# Of each: name, meaning, and field of a LearnerSpeed.
_SPEEDS = (
    ("tokens_per_second", "Tokens trained on, over the newest steps", "tokens_per_s"),
    ("mfu", "Model FLOP utilisation of its devices, over the newest steps", "mfu"),
    ("memory_bytes", "Memory of its devices; on a CPU of its process", "memory_bytes"),
    ("memory_peak_bytes", "The most that it was", "memory_peak_bytes"),
    ("data_wait_ratio", "Share of its time that went into the next batch", "data_wait_ratio"),
    ("data_wait_seconds", "Time that went into the next batch, of this life", "data_wait_s"),
)


def speed_metrics(*speeds: LearnerSpeed) -> Iterator[Metric]:
    """How fast learners train: a figure that nobody can know has no sample."""
    for name, text, field in _SPEEDS:
        gauge = GaugeMetricFamily(f"diloco_learner_{name}", text, labels=["run", "learner"])
        for speed in speeds:
            if (value := getattr(speed, field)) is not None:
                gauge.add_metric([speed.run, speed.learner], value)
        yield gauge


# --------------------------------------------------------------------------------------------------
# How much memory this process needs by itself.

_STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Anonymous resident memory: mapped files are left out, since the kernel can drop them.

    Where the system does not tell it apart, all that is resident.
    """
    try:
        for line in _STATUS.read_text(encoding="ascii").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return int(psutil.Process().memory_info().rss)
