"""Every syncer is gone with its disk, and others come under new names: the run goes on (I5)."""

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from live.processes import services
from live.stack import Stack, spec, up
from live.tape_checks import balanced, check_tape

from diloco_shared.protocol import subjects

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

KEEPING = {
    "snapshot_every_rounds": 12,
    "checkpoint_every_steps": 40,
    "begin_again_after_s": 6.0,
}


def syncers_of(stack: Stack) -> dict[str, int]:
    members = [m for m in stack.client.members() if m["role"] == "syncer" and m["alive"]]
    return {m["id"]: int(m["pid"]) for m in members}


@contextmanager
def lost(stack: Stack) -> Iterator[None]:
    """Their processes and all that they kept; the supervisor stands still and starts none."""
    supervisor = stack.family()[0]
    processes = {name: psutil.Process(pid) for name, pid in syncers_of(stack).items()}
    supervisor.suspend()
    try:
        for process in processes.values():
            process.kill()
        # Nobody takes note of their end while the supervisor stands still.
        dead = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        stack.wait_until(lambda: all(p.status() in dead for p in processes.values()), "their end")
        for name in processes:
            shutil.rmtree(stack.folder / name)
        yield
    finally:
        supervisor.resume()


@contextmanager
def started(stack: Stack, names: list[str]) -> Iterator[None]:
    """Syncers of these names, each with a data root of its own."""
    address, token = f"nats://{stack.endpoint()['nats']}", stack.nats_token()
    with services(stack.folder.parent, address, DILOCO_NATS_TOKEN=token) as others:
        for name in names:
            machine = stack.folder.parent / f"machine-of-{name}"
            others.start("diloco_syncer", name, DILOCO_DATA=str(machine))
        yield
        assert [process.stop() for process in others.all] == [0] * len(names)


def standing(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With a round that was committed and never published as one that was not: it is undone."""
    committed = [r for r in rounds if r["outcome"] == "committed"]
    newest = {(r["fragment"], r["version"]): r["round"] for r in committed}
    undone = {
        r["round"]: r["epoch"]
        for r in committed
        if newest[r["fragment"], r["version"]] != r["round"]
    }
    assert len(undone) <= 6 and set(undone.values()) <= {0}, "one of a fragment, of before it"
    return [{**r, "outcome": "skipped"} if r["round"] in undone else r for r in rounds]


async def purged(stack: Stack) -> bool:
    """UP has lost contributions that a snapshot covers: nobody can execute the tape from its start.

    They stay for as long as a living standby has not executed them.
    """
    async with stack.bus() as bus:
        return (await bus.stream_info(subjects.up_stream("r"))).first_seq > 1


@pytest.mark.long
def test_all_syncers_are_replaced_on_empty_disks_and_the_run_goes_on(tmp_path: Path) -> None:
    often = {"every_steps": 48, "sequences": 64}
    body = spec(evaluation=often, keeping=KEEPING, membership={"learners_min": 1})
    with up(tmp_path / "data", "--learners", "1", "--syncers", "2") as stack:
        stack.client.create_run(body)
        stack.wait_until(lambda: len(stack.evaluations()) >= 4, "evaluations")
        stack.wait_until(lambda: asyncio.run(purged(stack)), "rounds that a snapshot covers")
        losses, before = stack.evaluations(), stack.status()
        with lost(stack), started(stack, ["fresh-1", "fresh-2"]):
            assert len(stack.wait_until(lambda: stack.told("rebirth"), "a new epoch")) == 1
            stack.goes_on("the loss of every disk", more=12)
            after = stack.status()
            assert after["epoch"] == before["epoch"] + 1
            assert after["leader"] in ("fresh-1", "fresh-2")
            assert after["rounds_committed"] > before["rounds_committed"], "its history is kept"
            assert balanced(after)
            again = losses[-1]["steps"]
            later = stack.wait_until(
                lambda: next((e for e in stack.evaluations() if e["steps"] > again), None),
                "an evaluation afterwards",
            )
            worst = max(e["val_loss"] for e in losses[-3:])
            assert later["val_loss"] <= worst * 1.05, "the loss did not jump"
            # The other one has the state by now, and would lead.
            stack.wait_until(lambda: "standby" in stack.syncers().values(), "a standby")
            stack.end()
            check_tape(standing(stack.rounds()))
            assert balanced(stack.status())
            verified = stack.diloco("tape", "verify", "r")
            assert (verified["faults"], len(verified["rebirths"])) == ([], 1)
