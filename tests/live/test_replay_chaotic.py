"""A run among kills, hangs and a late learner executes again bit for bit; a flipped byte is placed.

The long version, of 500 rounds, is bench/replay.py.
"""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from live.stack import Stack, spec, up
from live.tape_checks import check_tape

from diloco_cli.tape_file import FORMATS, check
from diloco_shared.hub.nats_server import NatsServer
from diloco_shared.protocol import subjects

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

# (round, fault, target, settings): in order, each when its round is closed.
FAULTS: tuple[tuple[int, str, str, dict[str, Any]], ...] = (
    (6, "kill", "learner-1", {}),
    (12, "hang", "syncer", {"duration_s": 5.0}),  # longer than its lease: deposed
    (18, "slow", "learner-2", {"duration_s": 4.0, "factor": 8.0}),
    (24, "kill", "syncer", {}),
    (30, "kill", "nats", {}),
    (36, "hang", "learner-2", {"duration_s": 7.0}),  # longer than its lease: lost, and back
)
ROUNDS = 48


def inflict(stack: Stack, round_: int, kind: str, target: str, settings: dict[str, Any]) -> None:
    """On the leader, where a syncer is meant; tried again while somebody is away."""
    stack.wait_until(lambda: stack.rounds()[-1]["round"] >= round_, f"round {round_}")

    def accepted() -> bool:
        member = stack.leader() if target == "syncer" else target
        return bool(stack.client.chaos(kind, member, **settings))

    stack.wait_until(accepted, f"{kind} on {target}")


def flips_in_exports(stack: Stack, folder: Path) -> None:
    """Any byte of an exported tape, in both formats; the pure test tries every kind of change."""
    rng = random.Random(1)
    for form in FORMATS:
        file = folder / f"tape{form}"
        stack.run("tape", "export", "r", str(file))
        whole = file.read_bytes()
        assert check(whole, form) == (len(stack.diloco("tape", "show", "r")), "")
        for _ in range(50):
            changed = bytearray(whole)
            changed[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
            assert check(bytes(changed), form)[1].startswith("row ")


async def stored(stack: Stack, stream: str, subject: str) -> bytes:
    async with stack.bus() as bus:
        (first, *_) = await bus.fetch(stream, subject)
        return bytes(first.payload)


def flip(folder: Path, payload: bytes, place: int) -> None:
    """Change one bit of a message in the message server's own files."""
    for file in folder.rglob("*.blk"):
        content = bytearray(file.read_bytes())
        at = content.find(payload)
        if at >= 0:
            content[at + place] ^= 0x10
            file.write_bytes(content)
            return
    pytest.fail("the message is not in the server's files")


@pytest.mark.long
def test_a_chaotic_run_is_executed_again_and_a_flipped_byte_is_placed(tmp_path: Path) -> None:
    options = ("--learners", "2", "--syncers", "2", "--chaos")
    with up(tmp_path / "data", *options) as stack:
        stack.client.create_run(spec())
        for fault in FAULTS:
            inflict(stack, *fault)
        stack.wait_until(lambda: stack.rounds()[-1]["round"] >= ROUNDS, f"{ROUNDS} rounds")
        stack.end()
        check_tape(stack.rounds())
        verified = stack.diloco("tape", "verify", "r")
        assert (verified["faults"], verified["covered"]) == ([], 0)
        replayed = stack.diloco("replay", "r")
        assert (replayed["fault"], replayed["began_at"]) == (None, 0)
        assert replayed["rounds"] == len(stack.committed())
        flips_in_exports(stack, tmp_path)

        committed = [r for r in stack.rounds() if r["outcome"] == "committed"]
        merged = [v for v in committed[5]["verdicts"] if v["outcome"] == "merged"]
        chunk = asyncio.run(stored(stack, subjects.up_stream("r"), merged[0]["subject"]))
        record = asyncio.run(stored(stack, subjects.tape_stream("r"), "tape.r.0"))  # the first
    flip(stack.folder / "nats", chunk, len(chunk) // 2)
    flip(stack.folder / "nats", record, len(record) // 2)
    token = stack.nats_token()
    server = NatsServer(stack.folder / "nats", token=token)
    asyncio.run(server.start())
    try:
        where = ("--nats-url", f"nats://{server.address}", "--nats-token", token)
        faults = stack.diloco("tape", "verify", "r", *where, status=1)["faults"]
        # The first record is known by its number, the contribution by its subject.
        assert faults[0]["seq"] == 1
        assert any(merged[0]["subject"] in f["subject"] for f in faults)
        assert stack.diloco("replay", "r", *where, status=1)["fault"]["seq"] == 1
    finally:
        asyncio.run(server.stop())
