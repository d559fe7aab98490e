"""Fragments through JetStream file streams, beside bare asyncio streams in the same run.

    python bench/transport.py [--repeats 7] [--sizes 64,256] [--round-mib 64] [--json FILE]

put: `put_blob` until the server has stored every chunk. get: `get_blob` until the payload is
checked. put_4, get_4: over four connections. asyncio: the same bytes from one process to another,
thrown away as they come, over `asyncio.open_connection` and `start_server` as they are (three
pairs of processes, since their speed depends on luck: see `stream_reader`); asyncio_tuned: without
the luck, and with a reader's buffer eight times the default. All take turns; the figures are
medians, and of the sizes the worse. CPU seconds are the client process's own, all its threads, per
GB (1e9 bytes). The store is on disk: `--store` names the folder. durability: what it costs that
the tape is on disk when it is acknowledged, beside a server that syncs nothing.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from fragments.durability import durability
from fragments.rounds import large, rounds
from fragments.workers import Row, Server, Worker, client, stream_reader, stream_writer

from diloco_shared.hub.nats_server import NatsServer

MIB, GB = 1 << 20, 1e9
LEARNERS = (1, 4, 10)


class Bare:
    """Two processes and an asyncio stream in between."""

    def __init__(self, tuned: bool) -> None:
        self.reading = Worker(stream_reader, tuned)
        self.writing = Worker(stream_writer, self.reading.result())

    def send(self, size: int) -> Row:
        self.reading.begin("next")
        row: Row = self.writing.ask("write", size)
        return row | {"other_cpu_s": self.reading.result()["cpu_s"]}

    def end(self) -> None:
        self.writing.end()
        self.reading.end()


def measure(server: Server, url: str, sizes_mib: list[int], repeats: int) -> list[Row]:
    """One row per size, way and repeat."""
    bare = {
        "asyncio": [Bare(tuned=False) for _ in range(3)],
        "asyncio_tuned": [Bare(tuned=True)],
    }
    lanes = {
        f"_{n}" if n > 1 else "": [
            Worker(client, url, f"{way}-{n}", {"connections": n}) for way in ("put", "get")
        ]
        for n in (1, 4)
    }
    rows = []
    for repeat in range(repeats + 1):
        for mib in sizes_mib:
            size = mib * MIB
            taken = {way: [pair.send(size) for pair in pairs] for way, pairs in bare.items()}
            for suffix, (putting, getting) in lanes.items():
                before = server.cpu_s
                put = putting.ask("put", f"bench.{mib}.{repeat}{suffix}", size)
                taken[f"put{suffix}"] = [put | {"other_cpu_s": server.cpu_s - before}]
                before = server.cpu_s
                got = getting.ask("get", [put.pop("blob")])
                taken[f"get{suffix}"] = [got | {"other_cpu_s": server.cpu_s - before}]
                putting.ask("forget")
            if repeat:  # the first warms up
                rows += [
                    {"way": way, "mib": mib, **row} for way, some in taken.items() for row in some
                ]
    for workers in lanes.values():
        for worker in workers:
            worker.end()
    for pairs in bare.values():
        for pair in pairs:
            pair.end()
    return rows


def summary(rows: list[Row], sizes_mib: list[int]) -> dict[str, Row]:
    """Medians per size and way, and how they compare with asyncio."""
    table: dict[str, Row] = {}
    for mib in sizes_mib:
        gb = mib * MIB / GB
        for way in dict.fromkeys(row["way"] for row in rows):
            found = [r for r in rows if (r["mib"], r["way"]) == (mib, way)]
            table[f"{way}_{mib}"] = entry = {
                "gb_per_s": gb / statistics.median(r["wall_s"] for r in found),
                "cpu_s_per_gb": statistics.median(r["cpu_s"] for r in found) / gb,
                "other_cpu_s_per_gb": statistics.median(r["other_cpu_s"] for r in found) / gb,
            }
            for base in ("asyncio", "asyncio_tuned"):
                if not way.startswith("asyncio"):
                    rate = table[f"{base}_{mib}"]["gb_per_s"]
                    entry[f"over_{base}"] = entry["gb_per_s"] / rate
    return table


def show(title: str, table: dict[str, Row]) -> None:
    """Aligned columns on standard output."""
    names = list(dict.fromkeys(name for row in table.values() for name in row))
    widths = [max(len(name), 9) + 2 for name in names]
    print(f"\n{title}\n" + " " * 18, end="")
    print("".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
    for label, row in table.items():
        cells = (
            f"{row[name]:>{width}.3f}" if name in row else " " * width
            for name, width in zip(names, widths, strict=True)
        )
        print(f"{label:<18}" + "".join(cells))
    sys.stdout.flush()


def figures_of(table: dict[str, Row], sizes: list[int]) -> dict[str, float]:
    """The worst of the sizes."""
    figures = {}
    for way in ("put", "get"):
        found = [table[f"{way}_{mib}"] for mib in sizes]
        figures[f"{way}_over_asyncio"] = min(row["over_asyncio"] for row in found)
        figures[f"{way}_over_asyncio_tuned"] = min(row["over_asyncio_tuned"] for row in found)
        figures[f"cpu_s_per_gb_{way}"] = max(row["cpu_s_per_gb"] for row in found)
    return figures


def run(server: Server, url: str, args: argparse.Namespace) -> dict[str, Any]:
    sizes = [int(mib) for mib in args.sizes.split(",")]
    single = summary(measure(server, url, sizes, args.repeats), sizes)
    show("One fragment at a time (asyncio: other is the reader; else the server)", single)
    figures = figures_of(single, sizes)
    fleet = {
        f"{n} learners": rounds(server, url, n, args.round_mib, min(args.repeats, 3))
        for n in LEARNERS
    }
    show("Rounds: N learners -> syncer -> N learners", fleet)
    one = large(server, url)
    show("A fragment of 1 GiB, once", one)
    figures["peak_mib_beside_1_gib"] = max(row["peak_mib_beside_payload"] for row in one.values())
    figures["server_peak_mib_1_gib"] = max(row["server_peak_mib"] for row in one.values())
    print("\n" + "\n".join(f"{name}: {value:.3f}" for name, value in figures.items()))
    return {"figures": figures, "single": single, "rounds": fleet, "large": one}


async def main() -> None:
    """Print tables; write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sizes", default="64,256", help="MiB, comma separated")
    parser.add_argument("--round-mib", type=int, default=64, help="fragment of the rounds")
    parser.add_argument("--store", type=Path, help="folder for the server's files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.store) as folder:
        nats = NatsServer(Path(folder) / "nats")
        await nats.start()
        try:
            assert nats.pid is not None
            result = await asyncio.to_thread(run, Server(nats.pid), nats.url, args)
        finally:
            await nats.stop()
        result["durability"] = cost = await durability(Path(folder), args.round_mib, args.repeats)
    show("Synced tape and buckets, beside a server that syncs nothing", {"durability": cost})
    result["figures"] |= {name: cost[name] for name in ("records_per_s_synced", "bulk_of_unsynced")}
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    result |= {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {load} at the end",
        "command": " ".join(["python", *sys.argv]).split(" --json")[0],
        "seed": None,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
