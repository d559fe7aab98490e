"""A process's place in the cluster: one living process per id (I10)."""

import asyncio
import errno
import fcntl
import os
import re
import tomllib
from pathlib import Path
from random import Random

import pytest
from settled import Settled
from structlog.testing import capture_logs

from diloco_shared import VERSION
from diloco_shared.bus import stream_kv
from diloco_shared.bus.port import Bus
from diloco_shared.process.membership import (
    TTL_S,
    DataFolder,
    FolderTaken,
    Registration,
)
from diloco_shared.process.stopping import CLOSES_S
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Assignment, MemberRecord, boot_of
from diloco_shared.protocol.wire import decode, encode
from diloco_simulator.hub.broker import Fate, MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_simulator.virtual_loop import play

ROOT = Path(__file__).parents[3]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def broker(clock: Clock) -> MemoryBroker:
    return MemoryBroker(clock=clock)


async def prepared(broker: MemoryBroker) -> MemoryBus:
    bus = MemoryBus(broker, "test")
    for bucket in subjects.BUCKETS:
        await bus.ensure_bucket(bucket)
    return bus


async def shown(bus: Bus, member: str = "a") -> MemberRecord | None:
    entry = await bus.kv_get(subjects.MEMBERS, member)
    return None if entry is None or entry.value is None else decode(entry.value, MemberRecord)


async def test_a_member_says_which_release_it_is_of(broker: MemoryBroker) -> None:
    bus = await prepared(broker)
    await Registration(bus, "a", "learner", "lock-1").register()
    record = await shown(bus)
    assert record is not None and record.version == VERSION
    assert re.fullmatch(r"[a-z0-9_-]+", record.boot), "it becomes part of a subject"


def test_what_is_said_is_the_packages_version() -> None:
    """A release is cut by changing both."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["version"] == VERSION


def test_release_0_2_says_none() -> None:
    said = {"id": "a", "role": "learner", "host": "h", "pid": 1, "lock": "l", "started_at": 1.0}
    assert MemberRecord.model_validate({**said, "boot": "0" * 32}).version == ""
    assert MemberRecord.model_validate({**said, "boot": boot_of("1.2.3", "x")}).version == "1.2.3"


async def test_a_member_is_shown_until_it_leaves(broker: MemoryBroker) -> None:
    bus = await prepared(broker)
    member = Registration(bus, "a", "learner", "lock-1", address="127.0.0.1:80")
    await member.register()
    record = await shown(bus)
    assert record is not None and record.pid == os.getpid() and record.address == "127.0.0.1:80"
    member.update(run="r", state="working")
    await member.refresh()
    record = await shown(bus)
    assert record is not None and (record.run, record.state) == ("r", "working")
    await member.leave()
    assert await shown(bus) is None


def test_a_hub_that_is_away_is_not_asked_for_long_by_who_leaves() -> None:
    """Whoever told the process to stop kills it soon; its key expires."""

    async def main() -> float:
        bus = await prepared(MemoryBroker())
        member = Registration(bus, "a", "learner", "lock-1")
        await member.register()
        bus.disconnect()
        began = asyncio.get_running_loop().time()
        await member.leave()
        return asyncio.get_running_loop().time() - began

    assert play(main(), Random(1)) == CLOSES_S


async def test_a_silent_member_expires(broker: MemoryBroker, clock: Clock) -> None:
    bus = await prepared(broker)
    member = Registration(bus, "a", "learner", "lock-1")
    await member.register()
    clock.now += TTL_S + 1
    assert await shown(bus) is None
    # It was only held up: it takes its key again.
    await member.refresh()
    assert await shown(bus) is not None


async def test_an_id_in_use_is_waited_for(broker: MemoryBroker, clock: Clock) -> None:
    bus = await prepared(broker)
    one = Registration(bus, "a", "learner", "lock-1")
    two = Registration(bus, "a", "learner", "lock-2")
    await one.register()
    waiting = asyncio.create_task(two.register())
    await two.refresh()
    record = await shown(bus)
    assert record is not None and record.boot == one.record.boot and not waiting.done()
    clock.now += TTL_S + 1
    async with asyncio.timeout(30):
        await waiting
    record = await shown(bus)
    assert record is not None and record.boot == two.record.boot
    # The one that was silent does not take it back.
    await one.refresh()
    record = await shown(bus)
    assert record is not None and record.boot == two.record.boot


async def test_the_holder_of_the_same_lock_takes_over_at_once(broker: MemoryBroker) -> None:
    bus = await prepared(broker)
    dead = Registration(bus, "a", "learner", "lock-1")
    await dead.register()
    again = Registration(bus, "a", "learner", "lock-1")
    await again.register()
    record = await shown(bus)
    assert record is not None and record.boot == again.record.boot != dead.record.boot


async def test_a_record_that_nobody_can_read_blocks_nobody(broker: MemoryBroker) -> None:
    """I11"""
    bus = await prepared(broker)
    await bus.kv_put(subjects.MEMBERS, "a", b"rubbish", ttl_s=TTL_S)
    await Registration(bus, "a", "learner", "lock-1").register()
    assert await shown(bus) is not None


async def test_registering_survives_lost_requests_and_answers(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_shared.process.membership.REFRESH_S", 0.03)
    bus = await prepared(broker)
    fates: list[Fate] = ["lose_request", "deliver", "lose_answer", "deliver", "lose_answer"]

    def fault(client: str, operation: str, subject: str) -> Fate:
        return fates.pop(0) if client == "flaky" and fates else "deliver"

    broker.fault = fault
    member = Registration(MemoryBus(broker, "flaky"), "a", "learner", "lock-1")
    async with asyncio.timeout(30):
        await member.register()
    record = await shown(bus)
    assert record is not None and record.boot == member.record.boot


async def test_assignments_are_told_at_first_and_at_every_change(broker: MemoryBroker) -> None:
    bus = await prepared(broker)
    member = Registration(bus, "a", "learner", "lock-1")

    async def assign(run: str, who: str = "a", run_id: str = "") -> None:
        value = encode(Assignment(member=who, run=run, run_id=run_id, at=0.0))
        await bus.kv_put(subjects.ASSIGNMENTS, who, value)

    await assign("r-1")
    runs = member.assignments()
    async with asyncio.timeout(30):
        assert await anext(runs) == "r-1"
        await assign("r-9", who="b")
        await assign("r-1")  # no change
        await bus.kv_put(subjects.ASSIGNMENTS, "a", b"rubbish")
        await assign("r-2")
        assert await anext(runs) == "r-2"
        await assign("")
        assert await anext(runs) == ""
        await assign("r-3")
        assert await anext(runs) == "r-3"
        await assign("r-3", run_id="2")
        assert (await anext(runs), member.run_id) == ("r-3", "2"), "submitted again"
        await bus.kv_delete(subjects.ASSIGNMENTS, "a")
        assert await anext(runs) == ""
    await runs.aclose()


async def test_who_works_for_nothing_is_told_again_once_the_server_was_started_anew(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a hub that was put back the run that was over may go on, and the bucket be as it was."""
    monkeypatch.setattr(stream_kv, "POLL_S", 0.05)
    bus = await prepared(broker)
    member = Registration(bus, "a", "learner", "lock-1")
    assigned = encode(Assignment(member="a", run="r-1", run_id="", at=0.0))
    await bus.kv_put(subjects.ASSIGNMENTS, "a", assigned)
    runs = member.assignments()
    async with asyncio.timeout(30):
        assert await anext(runs) == "r-1"
        member.update(run="r-1")
        waiting = asyncio.ensure_future(anext(runs))
        await asyncio.sleep(0.2)
        broker.restart()
        await asyncio.sleep(0.2)
        assert not waiting.done(), "it works for that run"
        assert member.worked_for(), "and looks at it once more when it has left it"
        assert not member.worked_for()
        member.update(run="")
        broker.restart()
        assert await waiting == "r-1"
    await runs.aclose()


def test_a_data_folder_has_one_owner(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path, "a")
    with pytest.raises(FolderTaken, match=f"process {os.getpid()}") as taken:
        DataFolder(tmp_path, "a")
    assert taken.value.status == 1, "whoever has it may end, so another start may mend it"
    other = DataFolder(tmp_path, "b")
    assert other.lock != folder.lock
    lock = folder.lock
    folder.release()
    again = DataFolder(tmp_path, "a")
    assert again.lock == lock
    again.release()
    other.release()


def test_a_data_folder_has_its_name_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut takes all that is synced in it: checkpoints, the audit log."""
    settled, data = Settled(monkeypatch), tmp_path / "data"
    for member in ("a", "a", "b"):
        DataFolder(data, member).release()
    assert settled.calls[1:4] == [{"data"}, {"a"}, {"a"}]
    assert settled.calls[4:] == [{"data"}, {"a", "b"}]


@pytest.mark.parametrize("given", ["a", ""])
def test_a_file_system_without_locks_is_named_and_filled_with_no_folders(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(OSError, match=r"lock cannot be locked \(Function not implemented\)"):
        DataFolder.claim(tmp_path, "learner", given)
    assert len(list(tmp_path.iterdir())) == 1


async def test_an_id_whose_refresh_is_on_its_way_is_nobody_elses(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub without its majority keeps the first refresh waiting, and refuses those behind it."""
    monkeypatch.setattr("diloco_simulator.hub.bus.PATIENCE_S", 0.01)
    bus = await prepared(broker)
    member = Registration(bus, "a", "learner", "lock-1")
    await member.register()
    broker.lose_leader(tells=True)
    with capture_logs() as said:
        await member.refresh()
        await member.refresh()
    assert [line for line in said if line["log_level"] == "error"] == []
    assert not member.taken.is_set()
    broker.elected()
    await member.refresh()
    assert member.taken.is_set()


async def test_a_living_member_is_refreshed_by_one_request(broker: MemoryBroker) -> None:
    """Over a slow link, a look before each write takes longer than its key lasts."""
    bus, asked = await prepared(broker), list[str]()
    own = MemoryBus(broker, "own")
    member = Registration(own, "a", "learner", "lock-1")
    await member.register()

    def fault(client: str, operation: str, subject: str) -> Fate:
        if client == "own":
            asked.append(operation)
        return "deliver"

    broker.fault = fault
    for step in range(3):
        member.update(state=("idle", "working")[step % 2])
        await member.refresh()
    assert len(asked) == 3, asked
    record = await shown(bus)
    assert record is not None and record.state == "idle"
    await bus.kv_delete(subjects.MEMBERS, "a")  # it ran out: it is looked at, and taken again
    await member.refresh()
    assert await shown(bus) is not None and len(asked) > 4


async def test_a_reason_with_a_name_that_is_no_utf_8_is_shown(broker: MemoryBroker) -> None:
    """The process would end with the next refresh, begin again, and end again."""
    bus = await prepared(broker)
    registration = Registration(bus, "a", "learner", "lock")
    await registration.register()
    registration.update(state="unfit", reason=os.fsdecode(b"/caf\xe9.txt is damaged"))
    await registration.refresh()
    record = await shown(bus)
    assert record is not None and record.reason == "/caf?.txt is damaged"
