"""A snapshot from one disk to another: file by file, and on from where it broke."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from syncer.contexts import context
from waiting import until

from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import MemberRecord, SnapshotWish
from diloco_shared.protocol.wire import decode, encode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.snapshots import handover_io as handover
from diloco_syncer.snapshots.handover_io import NoSnapshot, SnapshotSender, fetch_snapshot
from diloco_syncer.snapshots.snapshots_io import SnapshotStore

VALUES = 3000


def arrays(seed: int, fragments: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"{p}.{name}": rng.standard_normal(VALUES).astype(np.float32)
        for p in range(fragments)
        for name in ("master", "anchor", "previous", "outer.0")
    }


class Two:
    """A leader with snapshots and a standby without, on one bus."""

    def __init__(self, folder: Path, state_bytes: int = 1 << 24) -> None:
        self.broker = MemoryBroker()
        self.control, self.data = MemoryBus(self.broker, "c"), MemoryBus(self.broker, "d")
        self.theirs = SnapshotStore(folder / "leader")
        self.ours = SnapshotStore(folder / "standby")
        self.spec = RunSpec.model_validate({"name": "r", "budget": {"steps": 80}})
        self.state_bytes = state_bytes
        self.asked: list[str] = []  # digests of files, "" for what describes the snapshot
        self.most = 0  # bytes on STATE when a file was asked for
        self.stream = subjects.state_stream("r")

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[SnapshotSender]:
        await self.data.ensure_stream(StreamSpec(self.stream, ("state.r.>",), self.state_bytes))
        sender = SnapshotSender(
            context(self.spec, self.control, "leader", data=self.data, snapshots=self.theirs)
        )
        answer = sender._answer

        async def listening(delivery: Any) -> bytes:
            self.asked.append(decode(delivery.payload, SnapshotWish).digest)
            self.most = max(self.most, (await self.data.stream_info(self.stream)).bytes)
            return await answer(delivery)

        sender._answer = listening  # type: ignore[method-assign]
        task = asyncio.create_task(sender.send())
        try:
            await asyncio.sleep(0)
            yield sender
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def fetch(self, standby: str = "standby", after: int = 0) -> int:
        return await fetch_snapshot(
            "r", 0, standby, self.control, self.data, self.ours, after=after
        )


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in wanted.items()}


async def test_one_file_at_a_time_lies_on_state(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.theirs.save(5, {"n": 5}, arrays(1))
    async with two.sending():
        assert await two.fetch() == 5
        assert (await two.data.stream_info(two.stream)).messages == 0
    assert len(two.asked) == 4 and two.asked[0] == ""
    assert two.most == 0, "the one before was taken away first"
    assert two.ours.load(5)[0] == {"n": 5} and same(two.ours.load(5)[1], arrays(1))


async def test_a_transfer_that_breaks_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, real, calls = Two(tmp_path), handover.get_blob, 0
    two.theirs.save(5, {}, arrays(1))

    async def breaks(*args: Any, **more: Any) -> memoryview:
        nonlocal calls
        calls += 1
        if calls == 3:  # what describes it, a file, and the second file
            raise Unavailable("the link is cut")
        return await real(*args, **more)

    monkeypatch.setattr(handover, "get_blob", breaks)
    async with two.sending():
        with pytest.raises(Unavailable):
            await two.fetch()
        assert two.ours.covers() == []
        before = len(two.asked)
        # A new process: all it has is the disk.
        two.ours = SnapshotStore(two.ours.folder)
        assert await two.fetch() == 5
    assert before == 3 and len(two.asked) - before == 3, "description, and the two that are missing"
    assert two.asked[1] not in two.asked[before:]
    assert same(two.ours.load(5)[1], arrays(1))


async def test_of_a_newer_one_only_what_changed_is_fetched(tmp_path: Path) -> None:
    two = Two(tmp_path)
    held = arrays(1)
    two.theirs.save(5, {}, dict(held))
    async with two.sending():
        await two.fetch()
        held |= {k: v for k, v in arrays(2).items() if k.startswith("1.")}
        two.theirs.save(9, {}, dict(held))
        before = len(two.asked)
        assert await two.fetch(after=5) == 9
    assert len(two.asked) - before == 2
    assert same(two.ours.load(9)[1], held)


async def test_an_older_one_is_of_no_use(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.theirs.save(5, {}, arrays(1))
    async with two.sending():
        with pytest.raises(NoSnapshot, match="has no snapshot after record 5"):
            await two.fetch(after=5)


async def test_the_snapshot_stays_while_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many the leader writes meanwhile: a slow link gets it all the same."""
    two, real = Two(tmp_path), handover.get_blob
    two.theirs.save(5, {}, arrays(1))
    covers = iter(range(6, 100))

    async def slowly(*args: Any, **more: Any) -> memoryview:
        for _ in range(3):
            n = next(covers)
            two.theirs.save(n, {}, arrays(n))
        return await real(*args, **more)

    monkeypatch.setattr(handover, "get_blob", slowly)
    async with two.sending():
        assert await two.fetch() == 5
    assert same(two.ours.load(5)[1], arrays(1))


async def test_one_standby_at_a_time_until_it_falls_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path)
    two.theirs.save(5, {}, arrays(1))
    async with two.sending() as sender:
        await two.fetch()
        two.ours = SnapshotStore(tmp_path / "other")
        with pytest.raises(NoSnapshot, match="is sending a snapshot to standby"):
            await two.fetch("other")
        sender.busy_until = 0.0
        assert await two.fetch("other") == 5


@pytest.mark.parametrize("lives", [True, False])
async def test_what_a_living_standby_still_reads_is_kept_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lives: bool
) -> None:
    """A file of 30 GB is read, checked and written for longer than nothing may be heard of it."""
    two, real = Two(tmp_path), handover.get_blob
    monkeypatch.setattr(handover, "IDLE_S", 0.05)
    two.theirs.save(5, {}, arrays(1))
    await two.control.ensure_bucket(subjects.MEMBERS)
    if lives:
        record = MemberRecord(
            id="standby", role="syncer", boot="b", host="h", pid=1, lock="l", started_at=1.0
        )
        await two.control.kv_put(subjects.MEMBERS, "standby", encode(record))
    kept: list[bool] = []

    async def slowly(*args: Any, **more: Any) -> memoryview:
        if kept or not args[2].bytes > 10_000:  # what describes it
            return await real(*args, **more)
        await asyncio.sleep(0.5)
        kept.append("r" in str(sender.snapshots.pinned))
        return await real(*args, **more)

    monkeypatch.setattr(handover, "get_blob", slowly)
    async with two.sending() as sender:
        assert await two.fetch() == 5
        assert kept == [lives]
        await until(lambda: not sender.snapshots.pinned)  # no longer than that


async def test_a_standby_that_asks_while_it_is_looked_for_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was heard of it for so long that the hub is asked whether it is still there."""
    two = Two(tmp_path)
    monkeypatch.setattr(handover, "IDLE_S", 0.05)
    two.theirs.save(5, {}, arrays(1))
    looked, asked = asyncio.Event(), asyncio.Event()
    real = two.data.fetch

    async def slow(*args: Any, **more: Any) -> Any:
        looked.set()
        await asked.wait()
        return await real(*args, **more)

    two.data.fetch = slow  # type: ignore[method-assign]
    async with two.sending() as sender:
        describing = SnapshotWish(standby="standby", nonce="n", after=0)
        where = subjects.snapshot_wish("r", 0)
        await two.control.request(where, encode(describing), timeout_s=1)
        await looked.wait()
        monkeypatch.setattr(handover, "IDLE_S", 60.0)
        await two.control.request(where, encode(describing), timeout_s=1)
        asked.set()
        await until(lambda: sender.wishes.empty() and sender.sending is None)
        assert sender.busy_with == "standby" and sender.snapshots.pinned


async def test_a_wish_that_comes_with_the_end_of_patience_is_served(tmp_path: Path) -> None:
    """Both in one turn of the event loop, which had stood still."""
    two = Two(tmp_path)
    two.theirs.save(5, {}, arrays(1))
    sender = SnapshotSender(
        context(two.spec, two.control, "leader", data=two.data, snapshots=two.theirs)
    )
    await two.data.ensure_stream(StreamSpec(two.stream, ("state.r.>",), two.state_bytes))
    wish = SnapshotWish(standby="standby", nonce="n", after=0)
    sender.busy_with, sender.busy_until = "standby", 0.0
    sender.wishes.get = asyncio.Event().wait  # type: ignore[assignment, method-assign]
    sender.wishes.put_nowait(wish)
    await sender._next()
    assert sender.busy_with == "standby"


async def test_a_purge_that_takes_longer_than_an_answer_breaks_no_transfer(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.theirs.save(5, {}, arrays(1))
    purge, tries = two.data.purge, [0]

    async def slow(stream: str, subject: str, *, below_seq: int | None = None) -> int:
        tries[0] += 1
        if tries[0] % 2:
            raise Unavailable("no answer within 5 s")
        return await purge(stream, subject, below_seq=below_seq)

    two.data.purge = slow  # type: ignore[method-assign]
    async with two.sending():
        assert await two.fetch() == 5
    assert len(two.asked) == len(set(two.asked)), "nothing was sent twice"


async def test_two_that_ask_at_once_are_served_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path)
    two.theirs.save(5, {}, arrays(1))
    third = SnapshotStore(tmp_path / "other")
    others = [
        fetch_snapshot("r", 0, name, two.control, two.data, store, after=0)
        for name, store in (("standby", two.ours), ("other", third))
    ]
    async with two.sending():
        found = await asyncio.gather(*others, return_exceptions=True)
    (refused,) = [f for f in found if not isinstance(f, int)]
    assert isinstance(refused, NoSnapshot) and "is sending a snapshot to" in str(refused)
    assert sorted(two.ours.covers() + third.covers()) == [5]


async def test_who_is_refused_keeps_nobody_waiting(tmp_path: Path) -> None:
    two = Two(tmp_path)
    two.theirs.save(5, {}, arrays(1))
    async with two.sending():
        with pytest.raises(NoSnapshot, match="after record 5"):
            await two.fetch(after=5)
        assert await two.fetch("other") == 5


async def test_of_two_that_hand_over_neither_takes_the_other_s_away(tmp_path: Path) -> None:
    """A leader answers wishes to the leader, and those to it by name."""
    two = Two(tmp_path)
    two.theirs.save(5, {}, arrays(1))
    where = subjects.snapshot_wish_to("r", 0, "leader")
    by_name = SnapshotSender(
        context(two.spec, two.control, "leader", data=two.data, snapshots=two.theirs), where
    )
    async with two.sending():
        giving = asyncio.create_task(by_name.send())
        await asyncio.sleep(0)
        await two.fetch()
        await fetch_snapshot(
            "r", 0, "b", two.control, two.data, SnapshotStore(tmp_path / "b"), after=0, of="leader"
        )
        giving.cancel()
        await asyncio.gather(giving, return_exceptions=True)
        for covers in (6, 7, 8):
            two.theirs.save(covers, {}, arrays(covers))
        assert two.theirs.covers() == [5, 7, 8]


async def test_what_does_not_fit_is_refused_with_the_figures(tmp_path: Path) -> None:
    two = Two(tmp_path, 1 << 20)
    huge = {"0.master": np.zeros(1 << 19, np.float32)}
    two.theirs.save(5, {}, dict(huge))
    async with two.sending():
        with pytest.raises(NoSnapshot, match=r"2097152 bytes of one fragment.*holds 1048576"):
            await two.fetch()


async def test_what_does_not_come_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = Two(tmp_path)
    two.theirs.save(5, {}, arrays(1))

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(handover, "silence_s", lambda: 0.05)
    monkeypatch.setattr(SnapshotSender, "_send", never)
    async with two.sending():
        with pytest.raises(NoSnapshot, match="nothing of it came within"):
            await two.fetch()


async def test_who_is_told_to_stop_while_the_hub_is_away_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be killed over what it leaves at the hub, and removes when it asks next."""
    two, asked = Two(tmp_path), asyncio.Event()
    two.theirs.save(5, {}, arrays(1))

    async def away(*_: Any, **__: Any) -> None:
        asked.set()
        two.data.purge = never  # type: ignore[method-assign]
        await asyncio.Event().wait()

    async def never(*_: Any, **__: Any) -> int:
        await asyncio.Event().wait()
        return 0

    monkeypatch.setattr(handover, "get_blob", away)
    monkeypatch.setattr(handover, "LEAVES_S", 0.01)
    async with two.sending():
        fetching = asyncio.create_task(two.fetch())
        await asked.wait()
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(fetching, 60.0)


async def test_an_answer_may_take_as_long_as_a_slow_link_lets_it(tmp_path: Path) -> None:
    """Whoever is asked has to ask the hub as well: about STATE, once for a snapshot."""
    two = Two(tmp_path)
    two.theirs.save(5, {"n": 5}, arrays(1))
    request, info, patience, looks = two.control.request, two.data.stream_info, [], []

    async def patient(subject: str, payload: bytes, *, timeout_s: float = 2.0) -> bytes:
        patience.append(timeout_s)
        return await request(subject, payload, timeout_s=timeout_s)

    async def look(stream: str) -> Any:
        looks.append(stream)
        return await info(stream)

    two.control.request = patient  # type: ignore[method-assign]
    async with two.sending():
        two.data.stream_info = look  # type: ignore[method-assign]
        assert await two.fetch() == 5
    assert len(patience) == 4 and min(patience) >= 10.0
    # The test's own sender looks once whenever it is asked.
    assert len(looks) == len(two.asked) + 1
