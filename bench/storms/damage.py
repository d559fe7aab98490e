"""Changes single bytes in a message server's own files, and looks whether it is found out."""

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_shared.bus.blobs import manifest_subject
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import TapeRound
from diloco_shared.protocol.wire import decode_tape
from storms.stack import Stack


@dataclass(frozen=True, slots=True)
class Part:
    """A stored message: what it is, the tape record it belongs to, its bytes, and one of them."""

    what: str
    record: int
    payload: bytes
    byte: int


async def stored_parts(stack: Stack, run: str, count: int, seed: int) -> list[Part]:
    """So many tape records, manifests and chunks of merged contributions, drawn from the seed."""
    rng, parts = random.Random(seed), []
    bus = await stack.bus()
    try:
        tape = await bus.fetch(subjects.tape_stream(run), subjects.tape(run, 0))
        # The last one among them: nothing follows it that could show that it is missing.
        for stored in (*rng.sample(tape[:-1], count - 1), tape[-1]):
            place = rng.randrange(len(stored.payload))
            parts.append(Part("tape record", stored.seq, bytes(stored.payload), place))
        merged = [
            (stored.seq, verdict.subject)
            for stored in tape
            if isinstance(record := decode_tape(stored.payload), TapeRound)
            for verdict in record.verdicts
            if verdict.outcome == "merged"
        ]
        up = subjects.up_stream(run)
        for what in ("manifest", "chunk"):
            for seq, subject in rng.sample(merged, count):
                where = subject if what == "chunk" else manifest_subject(subject)
                (found, *_) = await bus.fetch(up, where)
                payload = bytes(found.payload)
                parts.append(Part(what, seq, payload, rng.randrange(len(payload))))
    finally:
        await bus.close()
    return parts


async def damaged_stores(
    data: Path, run: str, parts: Sequence[Part], copy: Path
) -> list[dict[str, Any]]:
    """What `diloco tape verify` says of a store with one byte changed, for each part."""
    rows = []
    for part in parts:
        await asyncio.to_thread(_damage, data / "nats", copy, part)
        token = (data / "nats-token").read_text().strip()
        server = NatsServer(copy, token=token, dies_with_owner=True)
        await server.start()
        try:
            faults = await asyncio.to_thread(_verify, data, run, f"nats://{server.address}", token)
        finally:
            await server.stop()
        first = faults[0] if faults else {"seq": 0, "text": "nothing was found"}
        rows.append(
            {
                "what": part.what,
                "record": part.record,
                "byte": part.byte,
                "found": bool(faults),
                "placed": first["seq"] == part.record,
                "said": first["text"],
            }
        )
    return rows


def _damage(store: Path, copy: Path, part: Part) -> None:
    """A fresh copy of the store with one bit of one byte of the part changed."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(store, copy)
    for file in copy.rglob("*.blk"):
        content = bytearray(file.read_bytes())
        at = content.find(part.payload)
        if at >= 0:
            content[at + part.byte] ^= 0x10
            file.write_bytes(content)
            return
    raise SystemExit(f"the {part.what} of record {part.record} is not in the store's files")


def _verify(data: Path, run: str, url: str, token: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "diloco_cli", "tape", "verify", run, "--json"]
    done = subprocess.run(
        [*command, "--data", str(data), "--nats-url", url, "--nats-token", token],
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.stdout.startswith("{"):
        return [{"seq": 0, "text": (done.stderr or done.stdout).strip()}]
    faults: list[dict[str, Any]] = json.loads(done.stdout)["faults"]
    return faults
