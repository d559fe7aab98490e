"""Whole rounds, N learners -> syncer -> N learners; and one fragment of 1 GiB."""

import statistics
import time
from typing import Any

from fragments.workers import Row, Server, Worker, client

MIB, GIB, GB = 1 << 20, 1 << 30, 1e9


def rounds(server: Server, url: str, learners: int, mib: int, repeats: int) -> dict[str, Any]:
    """Every learner puts a fragment, the syncer gets all and puts one, every learner gets it."""
    size = mib * MIB
    syncer = Worker(client, url, "syncer", {})
    fleet = [Worker(client, url, f"learner-{n}", {}) for n in range(learners)]
    for worker in (syncer, *fleet):
        worker.ask("hold", size)
    rows = []
    for repeat in range(repeats + 1):
        server.reset_peak()
        row = _round(syncer, fleet, f"bench.{learners}.{repeat}", size)
        row["server_peak"] = server.peak()
        syncer.ask("forget")
        if repeat:  # the first warms up
            rows.append(row)
    for worker in (syncer, *fleet):
        worker.end()
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    in_flight = learners * size
    return {
        "fragment_mib": mib,
        "up_s": middle["up_s"],
        "gather_s": middle["gather_s"],
        "down_s": middle["down_s"],
        "round_s": middle["up_s"] + middle["gather_s"] + middle["down_s"],
        "up_gb_per_s": in_flight / GB / middle["up_s"],
        "down_gb_per_s": in_flight / GB / middle["down_s"],
        "syncer_peak_per_gib": middle["syncer_peak"] / in_flight,
        "server_peak_mib": middle["server_peak"] / MIB,
    }


def _round(syncer: Worker, fleet: list[Worker], subject: str, size: int) -> Row:
    marks = [time.perf_counter()]
    for n, learner in enumerate(fleet):
        learner.begin("put", f"{subject}.{n}", size)
    blobs = [learner.result()["blob"] for learner in fleet]
    marks.append(time.perf_counter())
    gathered = syncer.ask("get", blobs)
    marks.append(time.perf_counter())
    merged = syncer.ask("put", f"{subject}.merged", size)["blob"]
    for learner in fleet:
        learner.begin("get", [merged])
    for learner in fleet:
        learner.result()
    marks.append(time.perf_counter())
    names = ("up_s", "gather_s", "down_s")
    spans = {
        name: after - before
        for name, before, after in zip(names, marks[:-1], marks[1:], strict=True)
    }
    return spans | {"syncer_peak": gathered["peak_bytes"]}


def large(server: Server, url: str) -> dict[str, Row]:
    """One fragment of 1 GiB: rates, and the memory it takes beside the payload itself."""
    putting, getting = (Worker(client, url, name, {}) for name in ("put", "get"))
    putting.ask("hold", GIB)
    getting.ask("hold", 0)
    table = {}
    blob: Row = {}
    for way in ("put", "get"):
        server.reset_peak()
        before = server.cpu_s
        if way == "put":
            row = putting.ask("put", "bench.large", GIB)
            blob = row["blob"]
            beside = row["peak_bytes"]
        else:
            row = getting.ask("get", [blob])
            beside = row["peak_bytes"] - GIB
        table[f"{way}_1024"] = {
            "gb_per_s": GIB / GB / row["wall_s"],
            "cpu_s_per_gb": row["cpu_s"] / (GIB / GB),
            "server_cpu_s_per_gb": (server.cpu_s - before) / (GIB / GB),
            "peak_mib_beside_payload": beside / MIB,
            "server_peak_mib": server.peak() / MIB,
        }
    putting.ask("forget")
    for worker in (putting, getting):
        worker.end()
    return table
