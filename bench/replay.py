"""A chaotic run, executed again: is it the same, bit for bit, and is one changed byte found?

    python bench/replay.py [--rounds 500] [--every 25] [--seed 1] [--json FILE]

A real stack (`diloco up`: 3 learners, 2 syncers, coordinator, message server) trains a tiny model
and keeps every contribution. By a seeded schedule, one fault every 25 rounds on average, processes
are killed, hang, and fall behind. Then:

- `diloco tape verify` and `diloco replay` go through all of it: three digests of every merge.
- The tape is exported in both formats, and one byte after another is changed, at places drawn from
  the seed: `diloco tape check` must name the row.
- In the message server's own files, one byte of a tape record and of a contribution is changed at
  several places, each in a fresh copy of the store: `tape verify` or `replay` must name the record.
"""

import argparse
import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from runs import keep, surroundings
from storms.damage import damaged_stores, stored_parts
from storms.schedule import Fault, storm
from storms.stack import AWAY, Stack, until

from diloco_cli.tape_file import FORMATS, check

RUN = "replay"
LOOK_S = 0.5
# Bytes changed in each exported file; places changed in the store, of each kind.
FLIPS, STORE_FLIPS = 400, 4
SPEC: dict[str, Any] = {
    "name": RUN,
    "seed": 1,
    "algorithm": {"fragments": 6, "quorum": 1, "overlap_steps": 8},
    "model": {"overrides": {"width": 32, "layers": 1, "hidden": 32}},
    "membership": {"learners_min": 3},
    "evaluation": {"every_steps": 100_000, "sequences": 32},
    "keeping": {"contributions": "all", "checkpoint_every_steps": 200},
    "budget": {"steps": 10_000_000},
}


def chaotic(stack: Stack, faults: list[Fault], rounds: int) -> Counter[str]:
    """Train until so many rounds are closed, with each fault at its round."""
    until("all members", lambda: sum(m["alive"] for m in stack.client.members()) >= 7)
    stack.client.create_run(SPEC)
    until("the first round", lambda: stack.client.rounds(RUN))
    done: Counter[str] = Counter()
    waiting, closed = list(faults), 0
    while closed < rounds:
        try:
            closed = stack.client.rounds(RUN)[-1]["round"] + 1
            while waiting and waiting[0].at <= closed:
                fault = waiting[0]
                stack.client.chaos(fault.kind, fault.target, **fault.settings)
                done[f"{fault.kind} {fault.target.split('-')[0]}"] += 1
                waiting.pop(0)
        except AWAY:
            pass  # the coordinator, or the fault's target, is away: a moment later
        time.sleep(LOOK_S)
    stack.client.stop(RUN)
    until("the end", lambda: stack.client.run(RUN)["state"] == "stopped")
    return done


def exported(stack: Stack, folder: Path, seed: int) -> dict[str, Any]:
    """Changes of one byte in exported files: how many were found, and in their row."""
    rng, tried, found, placed = random.Random(seed), 0, 0, 0
    for form in FORMATS:
        file = folder / f"tape{form}"
        stack.told("tape", "export", RUN, str(file))
        whole = file.read_bytes()
        if check(whole, form)[1]:
            raise SystemExit(f"{file.name} is not as it was written a moment ago")
        ends = row_ends(whole, form)
        for _ in range(FLIPS):
            place = rng.randrange(len(whole))
            changed = bytearray(whole)
            changed[place] ^= 1 << rng.randrange(8)
            sound, fault = check(bytes(changed), form)
            tried += 1
            found += bool(fault)
            placed += bool(fault) and sound == sum(end <= place for end in ends)
    return {"changed": tried, "found": found, "placed": placed}


def row_ends(whole: bytes, form: str) -> list[int]:
    """Where each row ends."""
    if form == ".jsonl":
        return [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
    import msgpack

    unpacker, ends = msgpack.Unpacker(max_buffer_size=len(whole)), []
    unpacker.feed(whole)
    while unpacker.tell() < len(whole):
        unpacker.skip()
        ends.append(unpacker.tell())
    return ends


def figures_of(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    faults = storm(
        args.seed,
        mean=args.every,
        end=args.rounds,
        learners=[f"learner-{n}" for n in (1, 2, 3)],
        syncers=["syncer-1", "syncer-2"],
    )
    began = time.monotonic()
    with Stack(folder / "data", learners=3, syncers=2) as stack:
        done = chaotic(stack, faults, args.rounds)
        trained_s = time.monotonic() - began
        rounds = stack.client.rounds(RUN)
        verified = stack.diloco("tape", "verify", RUN)
        began = time.monotonic()
        replayed = stack.diloco("replay", RUN)
        replay_s = time.monotonic() - began
        flips = exported(stack, folder, args.seed)
        parts = asyncio.run(stored_parts(stack, RUN, STORE_FLIPS, args.seed))
    store = asyncio.run(damaged_stores(folder / "data", RUN, parts, folder / "copy"))
    shutil.rmtree(folder / "copy", ignore_errors=True)
    terms = {r["term"] for r in rounds}
    return {
        "figures": {
            "rounds": len(rounds),
            "committed": replayed["rounds"],
            "skipped": sum(r["outcome"] == "skipped" for r in rounds),
            "terms": len(terms),
            "faults": sum(done.values()),
            "contributions_compared": verified["contributions"],
            "tape_sound": not verified["faults"],
            "bit_identical": replayed["fault"] is None and replayed["began_at"] == 0,
            "exported_bytes_changed": flips["changed"],
            "exported_found": flips["found"],
            "exported_placed": flips["placed"],
            "stored_bytes_changed": len(store),
            "stored_found": sum(row["found"] for row in store),
            "stored_placed": sum(row["placed"] for row in store),
            "training_s": round(trained_s, 1),
            "replay_s": round(replay_s, 1),
        },
        "faults": dict(done),
        "store": store,
    }


def main() -> None:
    """Print a table; write the figures as JSON; status 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--every", type=float, default=25.0, help="mean rounds between faults")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        result = figures_of(args, Path(folder))
    for row in result["store"]:
        print(f"{row['what']:14} record {row['record']:>5} byte {row['byte']:>7}: {row['said']}")
    f = result["figures"]
    for name, value in f.items():
        print(f"{name:24} {value}")
    if args.json:
        about = {"seed": args.seed, "load_average_before": round(load, 1), **surroundings(__file__)}
        keep(args.json, {**result, **about})
    whole = f["tape_sound"] and f["bit_identical"]
    all_found = f["exported_placed"] == f["exported_bytes_changed"]
    sys.exit(0 if whole and all_found and f["stored_placed"] == f["stored_bytes_changed"] else 1)


if __name__ == "__main__":
    main()
