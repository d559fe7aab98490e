"""Fragments through JetStream file streams, beside bare asyncio streams in the same run.

    python bench/transport.py [--repeats 7] [--sizes 64,256] [--json FILE]

put: `put_blob` until the server has stored every chunk. get: `get_blob` until the payload is
checked. asyncio: the same bytes written by one process and read (and thrown away) by another.
The three take turns; the figures are medians. CPU seconds are the client process's own, all its
threads, per GB (1e9 bytes). `--store` names the folder of the server's files (a real disk).
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from diloco_shared.edges.blobs import get_blob, put_blob
from diloco_shared.edges.bus import StreamSpec
from diloco_shared.edges.nats_bus import NatsBus
from diloco_shared.edges.nats_server import NatsServer
from diloco_shared.protocol.messages import Blob

MIB, GB = 1 << 20, 1e9
STREAM = "BENCH"
# The largest fragment, some copies of it, and room to spare.
STREAM_BYTES = 8 << 30
BLOCK = 512 * 1024


class Worker:
    """A client process that carries out one command after the other."""

    def __init__(self, body: Callable[..., None], *args: Any) -> None:
        context = get_context("spawn")
        self.pipe, far = context.Pipe()
        self.process = context.Process(target=body, args=(far, *args), daemon=True)
        self.process.start()

    def ask(self, *command: Any) -> Any:
        self.begin(*command)
        return self.result()

    def begin(self, *command: Any) -> None:
        self.pipe.send(command)

    def result(self) -> Any:
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        self.pipe.send(("end",))
        self.process.join(20)


class Stopwatch:
    """Wall and CPU seconds of a block, in this process."""

    def __enter__(self) -> "Stopwatch":
        self.wall_s, self.cpu_s = -time.perf_counter(), -time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s += time.perf_counter()
        self.cpu_s += time.process_time()

    @property
    def row(self) -> dict[str, float]:
        return {"wall_s": self.wall_s, "cpu_s": self.cpu_s}


def rss_peak() -> int:
    """Most bytes of memory this process ever held."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def reset_rss_peak(pid: int | None = None) -> None:
    """From now on the peak is counted anew (Linux)."""
    Path(f"/proc/{pid or 'self'}/clear_refs").write_text("5")


# --- the client of the bus ------------------------------------------------------------------------


def bus_client(pipe: Connection, url: str, name: str, options: dict[str, Any]) -> None:
    asyncio.run(_bus_client(pipe, url, name, options))


async def _bus_client(pipe: Connection, url: str, name: str, options: dict[str, Any]) -> None:
    bus = await NatsBus.connect(url, name=name, **options)
    await bus.ensure_stream(StreamSpec(STREAM, ("bench.>",), STREAM_BYTES))
    payloads: dict[int, bytes] = {}
    while True:
        command, *args = await asyncio.to_thread(pipe.recv)
        try:
            match command:
                case "put":
                    subject, size = args
                    payload = payloads.setdefault(size, os.urandom(size))
                    with Stopwatch() as watch:
                        blob = await put_blob(bus, subject, payload)
                    pipe.send(watch.row | {"blob": blob.model_dump()})
                case "get":
                    blob = Blob.model_validate(args[0])
                    with Stopwatch() as watch:
                        received = await get_blob(bus, STREAM, blob, timeout_s=300)
                    assert len(received) == blob.bytes
                    del received
                    pipe.send(watch.row)
                case "forget":
                    payloads.clear()
                    pipe.send(await bus.purge(STREAM, "bench.>"))
                case "peak":
                    before = rss_peak()
                    reset_rss_peak()
                    pipe.send(before)
                case "end":
                    break
        except Exception as error:
            pipe.send(error)
    await bus.close()


# --- bare asyncio streams -------------------------------------------------------------------------


def stream_reader(pipe: Connection) -> None:
    asyncio.run(_stream_reader(pipe))


async def _stream_reader(pipe: Connection) -> None:
    done: asyncio.Queue[dict[str, float]] = asyncio.Queue(1)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(8):
            left = int.from_bytes(head, "big")
            with Stopwatch() as watch:
                while left:
                    left -= len(await reader.read(min(left, BLOCK)))
            writer.write(b"+")
            await done.put(watch.row)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=BLOCK)
    pipe.send(server.sockets[0].getsockname()[1])
    while (await asyncio.to_thread(pipe.recv))[0] != "end":
        pipe.send(await done.get())
    server.close()


def stream_writer(pipe: Connection, port: int) -> None:
    asyncio.run(_stream_writer(pipe, port))


async def _stream_writer(pipe: Connection, port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payloads: dict[int, memoryview] = {}
    while True:
        command, *args = await asyncio.to_thread(pipe.recv)
        if command == "end":
            break
        size = args[0]
        payload = payloads.setdefault(size, memoryview(os.urandom(size)))
        with Stopwatch() as watch:
            writer.write(size.to_bytes(8, "big"))
            for start in range(0, size, BLOCK):
                writer.write(payload[start : start + BLOCK])
                await writer.drain()
            await reader.readexactly(1)
        pipe.send(watch.row)
    writer.close()


# --- the runs -------------------------------------------------------------------------------------


class Server:
    """CPU and memory of the nats-server process."""

    def __init__(self, pid: int) -> None:
        self.process = psutil.Process(pid)

    @property
    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def take_peak(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        reset_rss_peak(self.process.pid)
        return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(
    server: Server, url: str, sizes_mib: list[int], repeats: int, options: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row per size, transfer and repeat."""
    reading = Worker(stream_reader)
    writing = Worker(stream_writer, reading.result())
    putting, getting = (Worker(bus_client, url, name, options) for name in ("put", "get"))
    rows = []
    for repeat in range(repeats + 1):
        for mib in sizes_mib:
            size = mib * MIB
            reading.begin("next")
            taken = {"asyncio": writing.ask("write", size)}
            taken["asyncio"]["reader_cpu_s"] = reading.result()["cpu_s"]
            for way, worker, *args in (
                ("put", putting, f"bench.{mib}.{repeat}", size),
                ("get", getting, None),
            ):
                before = server.cpu_s
                taken[way] = worker.ask(way, *([taken["put"]["blob"]] if way == "get" else args))
                taken[way]["server_cpu_s"] = server.cpu_s - before
            putting.ask("forget")
            if repeat:  # the first warms up
                rows += [{"way": way, "mib": mib, **row} for way, row in taken.items()]
    for worker in (writing, reading, putting, getting):
        worker.end()
    return rows


def summary(rows: list[dict[str, Any]], sizes_mib: list[int]) -> dict[str, Any]:
    """Medians per size and way, and put and get over asyncio."""
    table: dict[str, Any] = {}
    for mib in sizes_mib:
        for way in ("asyncio", "put", "get"):
            found = [r for r in rows if (r["mib"], r["way"]) == (mib, way)]
            gb = mib * MIB / GB
            entry = {
                "gb_per_s": gb / statistics.median(r["wall_s"] for r in found),
                "cpu_s_per_gb": statistics.median(r["cpu_s"] for r in found) / gb,
            }
            other = "reader_cpu_s" if way == "asyncio" else "server_cpu_s"
            entry[f"{other}_per_gb"] = statistics.median(r[other] for r in found) / gb
            table[f"{way}_{mib}"] = entry
        for way in ("put", "get"):
            entry = table[f"{way}_{mib}"]
            entry["over_asyncio"] = entry["gb_per_s"] / table[f"asyncio_{mib}"]["gb_per_s"]
    return table


def show(title: str, table: dict[str, Any]) -> None:
    """Aligned columns on standard output."""
    names = list(dict.fromkeys(name for row in table.values() for name in row))
    print(f"\n{title}")
    print(" " * 18 + "".join(f"{name:>22}" for name in names))
    for label, row in table.items():
        cells = (f"{row[name]:>22.3f}" if name in row else " " * 22 for name in names)
        print(f"{label:<18}" + "".join(cells))
    sys.stdout.flush()


async def main() -> None:
    """Print tables; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", default="64,256", help="MiB, comma separated")
    parser.add_argument("--store", type=Path, help="folder for the server's files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = [int(mib) for mib in args.sizes.split(",")]
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        nats = NatsServer(Path(folder) / "nats")
        await nats.start()
        try:
            assert nats.pid is not None
            server = Server(nats.pid)
            rows = await asyncio.to_thread(measure, server, nats.url, sizes, args.repeats, {})
            table = summary(rows, sizes)
            show("One client, one fragment at a time", table)
        finally:
            await nats.stop()
    figures = {
        "put_over_asyncio": min(table[f"put_{mib}"]["over_asyncio"] for mib in sizes),
        "get_over_asyncio": min(table[f"get_{mib}"]["over_asyncio"] for mib in sizes),
        "cpu_s_per_gb_put": max(table[f"put_{mib}"]["cpu_s_per_gb"] for mib in sizes),
        "cpu_s_per_gb_get": max(table[f"get_{mib}"]["cpu_s_per_gb"] for mib in sizes),
    }
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    if args.json:
        result = {
            "figures": figures,
            "single": table,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "command": " ".join(sys.argv),
            "seed": 0,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
