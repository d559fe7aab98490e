"""The small HTTP server for probes: says what it is asked, survives what it should not get."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from diloco_shared.bus.port import Traffic
from diloco_shared.process.health import REQUEST_BYTES_MAX, Health, HealthServer, traffic_metrics


@asynccontextmanager
async def serving(health: Health) -> AsyncIterator[int]:
    registry = CollectorRegistry()
    Counter("things", "Things seen", registry=registry).inc(3)
    server = HealthServer(lambda: health, registry)
    port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.close()


async def get(port: int, request: bytes) -> tuple[str, bytes]:
    """Status line and body of the answer; both empty when the server just hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        answer = await reader.read()
    except ConnectionError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), body


def line(path: str, method: str = "GET") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


@pytest.mark.parametrize(("ready", "readyz"), [(True, "200"), (False, "503")])
async def test_probes_tell_alive_from_ready(ready: bool, readyz: str) -> None:
    detail: dict[str, Any] = {"bus": "away since 3 s"}
    async with serving(Health(ready, detail)) as port:
        for path, wanted in (("/healthz", "200"), ("/readyz?x=1", readyz)):
            status, body = await get(port, line(path))
            assert status.split()[1] == wanted
            assert json.loads(body) == detail


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/secret"])
async def test_head_is_answered_as_get_without_the_body(path: str) -> None:
    async with serving(Health(False, {})) as port:
        wanted, _ = await get(port, line(path))
        assert await get(port, line(path, "HEAD")) == (wanted, b"")


async def test_metrics_are_in_prometheus_text() -> None:
    async with serving(Health(True, {})) as port:
        status, body = await get(port, line("/metrics"))
        assert status == "HTTP/1.1 200 OK"
        assert b"things_total 3.0" in body


async def test_nothing_is_changed_there_and_only_three_paths_are() -> None:
    async with serving(Health(True, {})) as port:
        assert (await get(port, line("/healthz", "POST")))[0].split()[1] == "405"
        status, body = await get(port, line("/secret"))
        assert status.split()[1] == "404"
        assert b"/healthz" in body


async def test_what_is_no_request_ends_the_connection_and_not_the_server() -> None:
    """I11, I12."""
    async with serving(Health(True, {})) as port:
        assert await get(port, b"x" * (REQUEST_BYTES_MAX * 2)) == ("", b"")
        assert (await get(port, b"\xff\xfe\r\n\r\n"))[0].split()[1] == "405"
        assert (await get(port, line("/healthz")))[0] == "HTTP/1.1 200 OK"


def test_what_crossed_each_plane_is_told_each_way() -> None:
    control = Traffic(bytes_out=1, bytes_in=2, socket_bytes_out=3, socket_bytes_in=4)
    data = Traffic(bytes_out=5, bytes_in=6, socket_bytes_out=7, socket_bytes_in=8)
    data.refused["chunk", "digest"] = 9
    planes = {"control": control, "data": data}
    told = {
        (metric.name, *sample.labels.values()): sample.value
        for metric in traffic_metrics(planes)
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    assert told == {
        ("diloco_bus_bytes", "control", "out"): 1,
        ("diloco_bus_bytes", "control", "in"): 2,
        ("diloco_socket_bytes", "control", "out"): 3,
        ("diloco_socket_bytes", "control", "in"): 4,
        ("diloco_bus_bytes", "data", "out"): 5,
        ("diloco_bus_bytes", "data", "in"): 6,
        ("diloco_socket_bytes", "data", "out"): 7,
        ("diloco_socket_bytes", "data", "in"): 8,
        ("diloco_bus_refused", "data", "chunk", "digest"): 9,
    }
