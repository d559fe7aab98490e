"""Whole rounds with real processes: N learners -> message server -> syncer -> server -> N learners.

The syncer is a process that fetches, gates, merges and publishes as the product's does; learners
only put and get. Decisions are left out: decisions.py measures those.
"""

import asyncio
import statistics
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

from fragments.workers import PATIENCE_S, STREAM, Row, Server, Stopwatch, Worker, _Client, client

from diloco_shared.bus.blobs import get_blob, put_blob
from diloco_shared.protocol.messages import Blob
from diloco_syncer.merging.store import Contribution
from diloco_syncer.rounds.norms import inspect
from scaling.merging import Case

GB = 1e9


def merging(pipe: Connection, url: str, name: str, options: Row) -> None:
    """A process that can also merge."""
    asyncio.run(_Merging(pipe).run(url, name, options))


class _Merging(_Client):
    case: Case

    async def prepare(self, values: int) -> bytes:
        """Become a syncer of one fragment; a contribution to it."""
        self.case = Case(1, values)
        self.case.round(1)
        return self.case.payloads[0]

    async def merge(self, subject: str, blobs: list[Row]) -> Row:
        """A round: fetch all, gate, merge, publish."""
        case, spent = self.case, {}
        with Stopwatch() as watch:
            fetched = await asyncio.gather(
                *(
                    get_blob(self.bus, STREAM, Blob.model_validate(blob), timeout_s=PATIENCE_S)
                    for blob in blobs
                )
            )
        spent["fetch"] = watch.row
        with Stopwatch() as watch:
            norms = [inspect(p, "bf16", case.size, case.pieces).norms_P for p in fetched]
            version = case.store.version(0)
            contributions = [
                Contribution(f"learner-{m:03d}", 1.0, version, payload, "bf16", norms[m])
                for m, payload in enumerate(fetched)
            ]
            case.store.install(0, staged := case.store.stage(0, contributions, keyframe=False))
        spent["merge"] = watch.row
        with Stopwatch() as watch:
            published = await put_blob(self.bus, subject, staged.payload)
        spent["publish"] = watch.row
        return {"blob": published.model_dump(), "spent": spent}


def rounds(server: Server, url: str, learners: int, values: int, repeats: int) -> dict[str, Any]:
    """Means of processor seconds, of the server and of the syncer, by phase."""
    syncer = Worker(merging, url, "syncer", {})
    fleet = [Worker(client, url, f"learner-{n}", {}) for n in range(learners)]
    payload = syncer.ask("prepare", values)
    for worker in fleet:
        worker.ask("keep", payload)
    size = len(payload)
    rows = []
    for repeat in range(repeats + 1):
        row = _round(server, syncer, fleet, f"bench.{learners}.{repeat}", size)
        syncer.ask("forget")
        if repeat:  # the first warms up
            rows.append(row)
    for worker in (syncer, *fleet):
        worker.end()
    # Not medians: Linux counts the server's processor time in hundredths of a second.
    usual = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
    return {"learners": learners, "values": values, "gb": size / GB, **usual}


def _round(server: Server, syncer: Worker, fleet: list[Worker], subject: str, size: int) -> Row:
    marks = [(server.cpu_s, time.perf_counter())]
    for n, learner in enumerate(fleet):
        learner.begin("put", f"{subject}.{n}", size)
    put = [learner.result() for learner in fleet]
    marks.append((server.cpu_s, time.perf_counter()))
    answer = syncer.ask("merge", f"{subject}.merged", [row["blob"] for row in put])
    marks.append((server.cpu_s, time.perf_counter()))
    for learner in fleet:
        learner.begin("get", [answer["blob"]])
    got = [learner.result() for learner in fleet]
    marks.append((server.cpu_s, time.perf_counter()))
    server_s = [after[0] - before[0] for before, after in pairwise(marks)]
    spent = answer["spent"]
    return {
        "server_up_s": server_s[0],
        "server_merge_s": server_s[1],
        "server_down_s": server_s[2],
        "syncer_fetch_s": spent["fetch"]["cpu_s"],
        "syncer_merge_s": spent["merge"]["cpu_s"],
        "syncer_publish_s": spent["publish"]["cpu_s"],
        "learners_s": sum(row["cpu_s"] for row in (*put, *got)),
        "round_wall_s": marks[-1][1] - marks[0][1],
        "up_wall_s": marks[1][1] - marks[0][1],
        "down_wall_s": marks[3][1] - marks[2][1],
    }
