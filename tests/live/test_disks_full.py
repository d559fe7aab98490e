"""A member's or the hub's disk is full: named, nothing is lost, and all goes on (I5, I6)."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from live.small_disk import MIB, fill, small_disk
from live.stack import Stack, spec, up
from live.tape_checks import balanced, check_tape

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

# Some times what a member of the nano model keeps, of which a third is enough to go on.
DISK = 64 * MIB
# Of the hub: far more than the streams of the nano model hold in a minute.
HUB_DISK = 512 * MIB
MEMBERS = ("learner-1", "syncer-1", "syncer-2")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Two learners and two syncers; those of MEMBERS have a small disk each, and so has the hub."""
    with ExitStack() as opened:
        opened.enter_context(small_disk(tmp_path / "data" / "nats", HUB_DISK))
        for member in MEMBERS:
            opened.enter_context(small_disk(tmp_path / "data" / member, DISK))
        yield opened.enter_context(up(tmp_path / "data", "--learners", "2", "--syncers", "2"))


def kept(stack: Stack, member: str) -> set[str]:
    """Names of the complete snapshots or checkpoints of a member."""
    files = (stack.folder / member).glob("*/*/*")
    return {f.name for f in files if f.name.startswith("snapshot-") or f.suffix == ".safetensors"}


def metrics(stack: Stack, member: str) -> list[str]:
    """What the coordinator's metrics and the member's own say of its disk."""
    urls = (stack.endpoint()["url"], f"http://{stack.client.member(member)['address']}")
    token = stack.token()
    wanted = f'diloco_disk_full{{member="{member}",run="r"}} '
    found = []
    for url in urls:
        text = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {token}"}).text
        found += [line.removeprefix(wanted) for line in text.splitlines() if wanted in line]
    return found


def named(stack: Stack, member: str) -> bool:
    """In the member list, the run's state line and the metrics."""
    folder, shown = str(stack.folder / member), stack.client.member(member)["full"]
    line = f"{member}: {folder}"
    run = stack.client.run("r")
    told = "members-full" in run["reason_codes"] and line in run["reason"]
    return folder in shown and "free disk space there" in shown and told


@pytest.mark.long
def test_nobody_waits_for_a_member_whose_disk_is_full(stack: Stack) -> None:
    stack.client.create_run(spec())
    stack.wait_until(lambda: all(kept(stack, m) for m in MEMBERS), "something on each disk")
    leader = stack.wait_until(stack.leader, "a leader")
    standby = next(m for m in MEMBERS[1:] if m != leader)
    for member in ("learner-1", leader, standby):
        filler = fill(stack.folder / member)
        stack.wait_until(lambda m=member: named(stack, m), f"the full disk of {member}")
        assert metrics(stack, member) == ["1.0", "1.0"]
        before = kept(stack, member)
        # More than two intervals of what it keeps.
        stack.goes_on(f"a full disk of {member}", more=30)
        assert stack.client.run("r")["state"] == "running"
        assert stack.leader() == leader
        assert kept(stack, member) == before, "none was written, and none was lost"
        assert named(stack, member), "it says so all the while"
        filler.unlink()
        stack.wait_until(lambda m=member: not stack.client.member(m)["full"], f"room for {member}")
        stack.wait_until(lambda m=member, b=before: kept(stack, m) - b, f"what {member} keeps")
        stack.wait_until(lambda: "members-full" not in stack.codes(), "a reason without it")
        assert metrics(stack, member) == ["0.0", "0.0"]
    by_kind = {k: [e["source"] for e in stack.told(k)] for k in ("full", "room-again")}
    assert by_kind == {k: ["learner-1", leader, standby] for k in by_kind}
    assert len(stack.told("checkpoint-failed")) == 1, "told when it began"
    stack.end()
    check_tape(stack.rounds())
    assert balanced(stack.status())
    assert stack.diloco("tape", "verify", "r")["faults"] == []


@pytest.mark.long
def test_a_hub_out_of_disk_is_named_although_no_status_can_be_written(stack: Stack) -> None:
    # Contributions are acknowledged from memory: those that the server could not write any more are
    # gone. What was merged of them is not, once a snapshot covers it.
    keeping = {"snapshot_every_rounds": 12, "checkpoint_every_steps": 40}
    stack.client.create_run(spec(keeping=keeping))
    stack.wait_until(lambda: len(stack.committed()) > 12, "rounds")
    before = stack.status()
    filler = fill(stack.folder / "nats")

    def full() -> bool:
        fill(stack.folder / "nats")  # what was purged meanwhile is room for the run to go on in
        return bool(stack.client.run("r")["state"] == "full")

    stack.wait_until(full, "the state")
    assert "the hub's disk is full" in stack.client.run("r")["reason"]
    time.sleep(6)  # longer than its leader's lease, which nobody can renew on that disk
    fill(stack.folder / "nats")
    assert stack.client.run("r")["state"] == "full"
    filler.unlink()
    stack.wait_until(
        lambda: stack.client.run("r")["state"] == "running", "the state once there is room"
    )
    stack.goes_on("room on the hub", more=30)  # more than two intervals of snapshots
    assert stack.status()["rounds_committed"] > before["rounds_committed"]
    stack.end()
    check_tape(stack.rounds())
    assert balanced(stack.status())
    assert stack.diloco("tape", "verify", "r")["faults"] == []
