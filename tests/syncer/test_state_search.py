"""Standbys that cannot execute the tape: what they show while they look for a way on."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from syncer.contexts import context
from syncer.test_standby import SPEC
from syncer.test_tape import put_back, stream, term

from diloco_shared.bus.port import Stored, StreamSpec, Unavailable
from diloco_shared.checkpoints.tape_archive_io import TapeArchive
from diloco_shared.checkpoints.vault_io import Vault, VaultError
from diloco_shared.protocol import subjects
from diloco_shared.protocol.wire import encode
from diloco_simulator.hub.bus import MemoryBroker, MemoryBus
from diloco_syncer.history import follow_io as follow
from diloco_syncer.history import state_search_io as stuck
from diloco_syncer.history.follow_io import Damaged, Follower, Replaced
from diloco_syncer.history.history import History
from diloco_syncer.history.state_search_io import StateSearch
from diloco_syncer.history.tape_io import Purged, Tape, Unread
from diloco_syncer.snapshots.finding_io import FoundState


class Reading:
    """A follower that reads what is published until everybody else reads too."""

    def __init__(self, together: "Together") -> None:
        self.together = together
        self.history = SimpleNamespace(seq=3)

    async def begin_again(self, known: object, why: str, progress: object) -> None:
        self.together.reading += 1
        if self.together.reading == len(self.together.states):
            self.together.all_read.set()
        await self.together.all_read.wait()


class Together:
    """Syncers of one shard, and the states that they show."""

    def __init__(self, *names: str) -> None:
        self.states = dict.fromkeys(names, "ineligible")
        self.reading, self.all_read = 0, asyncio.Event()

    def stuck(self, name: str) -> StateSearch:
        keeper: Any = SimpleNamespace(lease=SimpleNamespace(me=name), elsewhere="")
        nothing: Any = None

        def show(state: str, why: str, seq: int) -> None:
            self.states[name] = state

        found = StateSearch(context(SPEC, nothing, name), keeper, nothing, show, nothing)
        found.last_resort.since = -1e9  # nobody was seen for long who may have the state
        return found

    async def others(self, control: object, run: str, shard: int, me: str) -> list[Any]:
        return [SimpleNamespace(id=n, state=s) for n, s in self.states.items() if n != me]


async def test_two_that_read_what_is_published_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = Together("s1", "s2")

    async def nobody_asked(*_: object) -> None: ...

    monkeypatch.setattr(stuck, "other_syncers", together.others)
    monkeypatch.setattr(stuck, "readable_at", nobody_asked)
    known: Any = SimpleNamespace(seq=3)

    async def begins(name: str) -> str:
        follower: Any = Reading(together)
        return await together.stuck(name)._begin_again(follower, known, "no snapshot")

    assert list(await asyncio.gather(begins("s1"), begins("s2"))) == ["", ""]


class InVain(StateSearch):
    """Nobody else has anything."""

    async def _newer(self, after: int, *, checkpoints: bool = False) -> Follower | None:
        self.checkpoints_at = 0.0
        return None

    async def _ask_for_snapshot(self, after: int) -> str:
        return "nobody answers"

    async def _why_not_begin_again(self, seq: int) -> str:
        return "not yet"


class Sources(StateSearch):
    """Of one snapshot: where it is, and in which order it was looked for."""

    has, asked = "", ()

    def looks(self, place: str, has: str) -> FoundState | None:
        self.asked = (*self.asked, place)
        meta = History(SPEC).meta() | {"seq": 5}
        return FoundState(meta, None, "snapshot") if self.has == has else None  # type: ignore[arg-type]

    def newer(self, after: int, *, before: float) -> FoundState | None:
        return self.looks("here", "here")

    async def newest_checkpoint(self, *_: object, before: float) -> FoundState | None:
        return self.looks("checkpoints", "checkpoints")

    async def _ask_for_snapshot(self, after: int) -> str:
        if self.looks("a living syncer", "a living syncer") is None:
            return "nobody answers"
        self.has = "here"
        return ""


@pytest.mark.parametrize(
    ("has", "asked"),
    [
        ("here", ("here",)),
        ("a living syncer", ("here", "a living syncer", "here")),
        ("checkpoints", ("here", "a living syncer", "here", "checkpoints")),
    ],
)
async def test_who_lives_is_asked_before_the_place_of_checkpoints(
    has: str, asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has more; and a place that hangs would hold up the question for hours."""
    bus, nothing = MemoryBus(MemoryBroker(), "s"), cast(Any, None)

    async def is_of_tape(*_: object) -> bool:
        return True

    def fresh() -> Follower:
        where = {"newer": here.newer, "newest_checkpoint": here.newest_checkpoint}
        finder: Any = SimpleNamespace(snapshots=None, **where)
        return Follower(SPEC, bus, Tape(bus, "r"), finder)

    monkeypatch.setattr(Follower, "_is_of_tape", is_of_tape)
    here = Sources(context(SPEC, bus, "s1"), nothing, fresh, lambda *_: None, nothing)
    here.has = has
    found = await here.way_on(fresh(), Purged("record 3 is gone"))
    assert found.history.seq == 5 and here.asked == asked


class Later(InVain):
    """At the second look there is one, or what was read can be read again."""

    looks = 0

    def __init__(self, found: Follower | None, *rest: Any) -> None:
        super().__init__(*rest)
        self.found = found

    async def _newer(self, after: int, *, checkpoints: bool = False) -> Follower | None:
        self.looks += 1
        return self.found if self.looks > 2 else None

    async def _readable(self, follower: Follower) -> bool:
        return self.looks > 2


@pytest.mark.parametrize("another", [True, False])
async def test_who_found_a_way_on_does_not_show_any_more_why_it_had_none(
    monkeypatch: pytest.MonkeyPatch, *, another: bool
) -> None:
    """Until it has caught up, UP waits for it, and others count it among those who may have more.

    No world looks at what a member shows beside what it does.
    """
    monkeypatch.setattr(stuck, "RETRY_S", 0.0)
    nothing, shown = cast(Any, None), list[tuple[str, str, int]]()

    async def tell(*_: str) -> None: ...

    async def look_back() -> None: ...

    def follower(seq: int) -> Any:
        return SimpleNamespace(
            history=SimpleNamespace(seq=seq), look_back=look_back, let_go=lambda: None
        )

    keeper: Any = SimpleNamespace(lease=SimpleNamespace(me="s1"), fit=lambda why: None)
    rest = context(SPEC, nothing, "s1"), keeper, nothing, lambda *what: shown.append(what), tell
    left, newer = follower(3), follower(9)
    here = Later(newer if another else None, *rest)
    found = await here.way_on(left, (Purged if another else Damaged)("record 4 is gone"))
    assert found is (newer if another else left)
    (state, why, _), last = shown
    assert state == "ineligible" and "record 4 is gone" in why
    assert last == ("catching up", "", 9 if another else 3)


class Back(InVain):
    """What was gone can be read once the message server has begun a new life."""

    async def _readable(self, follower: Follower) -> bool:
        return True


@pytest.mark.parametrize("new_life", [True, False])
async def test_what_a_backup_has_brought_back_is_executed(
    monkeypatch: pytest.MonkeyPatch, *, new_life: bool
) -> None:
    """UP had lost a contribution, and the hub was put back from a backup that has it. The syncer
    began again from what was published, with less than there was."""
    looks, nothing = list[bool](), cast(Any, None)

    async def tell(*_: str) -> None: ...

    async def look_back() -> bool:
        looks.append(True)
        if len(looks) == 4:
            raise Looked
        return new_life and len(looks) == 2

    class Looked(Exception):
        pass

    monkeypatch.setattr(stuck, "RETRY_S", 0.0)
    keeper: Any = SimpleNamespace(lease=SimpleNamespace(me="s1"), fit=lambda why: None)
    here = Back(context(SPEC, nothing, "s1"), keeper, nothing, lambda *_: None, tell)
    left: Any = SimpleNamespace(
        history=SimpleNamespace(seq=3), look_back=look_back, let_go=lambda: None
    )
    with pytest.raises(Replaced if new_life else Looked):
        await here.way_on(left, Purged("record 4 is gone"))
    assert len(looks) == (2 if new_life else 4)


async def archived(folder: Path) -> Tape:
    """Two records of three lie in the archive alone."""
    bus = MemoryBus(MemoryBroker(), "s")
    await stream(bus)
    archive = TapeArchive(str(folder), "r.1")
    tape = Tape(bus, "r", 0, archive)
    for number in (1, 2, 3):
        await tape.append(term(number, "s"))
    archive.write((await bus.fetch(tape.stream, tape.subject))[:2])
    await bus.purge(tape.stream, tape.subject, below_seq=3)
    return tape


async def test_a_store_that_was_away_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both syncers read the archive while its store was away, and no disk had a snapshot."""
    tape = await archived(tmp_path)
    away, keys = [True] * 3, Vault.keys

    def reached(vault: Vault, prefix: str = "") -> list[str]:
        if away and away.pop():
            raise VaultError("No route to host")
        return keys(vault, prefix)

    monkeypatch.setattr(Vault, "keys", reached)
    monkeypatch.setattr(stuck, "RETRY_S", 0.0)
    nothing: Any = None
    finder: Any = SimpleNamespace(snapshots=None)
    follower = Follower(SPEC, tape.bus, tape, finder)
    with pytest.raises(Unread) as fault:
        await tape.read()
    shown: list[str] = []

    async def tell(kind: str, text: str) -> None:
        shown.append(text)

    keeper: Any = SimpleNamespace(lease=SimpleNamespace(me="s1"), fit=lambda why: None)
    here = InVain(context(SPEC, nothing, "s1"), keeper, nothing, lambda *_: None, tell)
    assert await here.way_on(follower, fault.value) is follower
    assert len(shown) == 1 and "No route to host" in shown[0] and not away
    assert len(await follower.tape.read()) == 3


async def test_a_tape_that_was_walked_half_is_walked_on_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each hiccup of the message server began it anew, and nobody saw how far it was."""
    monkeypatch.setattr(follow, "BATCH_RECORDS", 2)
    bus = MemoryBus(MemoryBroker(), "s")
    await stream(bus)
    for number in range(1, 8):
        await bus.append(subjects.tape("r", 0), encode(term(number, "s")))
    asked, away, shown = list[int](), [4], list[str]()
    stored = Tape.stored

    async def read(tape: Tape, after: int = 0, *, limit: int | None = None) -> list[Stored]:
        if limit == 2:
            asked.append(after)
            if after in away:
                away.remove(after)
                raise Unavailable("the bus is away")
        return await stored(tape, after, limit=limit)

    monkeypatch.setattr(Tape, "stored", read)
    nothing: Any = None
    finder: Any = SimpleNamespace(snapshots=SimpleNamespace(shelf=None, folder=""))
    here = InVain(
        context(SPEC, nothing, "s1"), nothing, nothing, lambda *what: shown.append(what[1]), nothing
    )

    async def begins() -> str:
        follower = Follower(SPEC, bus, Tape(bus, "r"), finder)
        return await here._begin_again(follower, History(SPEC), "no snapshot")

    assert "the bus is away" in await begins() and asked == [0, 2, 4]
    assert "nothing has been published" in await begins() and asked[3:] == [4, 6, 7]
    assert "nothing has been published" in await begins() and asked[6:] == [7]
    walked = [text.partition(",")[0] for text in shown if "record" in text]
    assert walked == [f"reads record {n} of 7 of the tape" for n in (2, 4, 6, 7)]
    await put_back(bus, lost=1, added=1)
    with pytest.raises(Replaced):
        await begins()
    assert "nothing has been published" in await begins() and asked[7:] == [0, 2, 4, 6, 7]


async def test_a_tape_that_was_walked_in_vain_is_not_walked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody came back meanwhile, and perhaps goes away again."""
    nothing: Any = None
    here = InVain(context(SPEC, nothing, "s1"), nothing, nothing, lambda *_: None, nothing)
    began, read = list[int](), History(SPEC)
    read.seq = 9

    async def begin_again(known: History, *_: object) -> None:
        began.append(known.seq)

    follower: Any = SimpleNamespace(history=read, begin_again=begin_again)
    for _ in range(2):
        assert await here._begin_again(follower, History(SPEC), "") == "not yet"

    async def now(seq: int) -> str:
        return ""

    monkeypatch.setattr(here, "_why_not_begin_again", now)
    assert await here._begin_again(follower, History(SPEC), "") == ""
    assert began == [0, 9, 9] and here.walked is None, "who goes on has it alone"


async def test_what_is_gone_from_the_archive_stays_unread(tmp_path: Path) -> None:
    tape = await archived(tmp_path)
    assert tape.archive is not None
    finder: Any = SimpleNamespace(snapshots=None)
    follower = Follower(SPEC, tape.bus, tape, finder)
    assert await follower.readable()
    tape.archive.vault.write(tape.archive.segments()[0].key, None)
    assert not await follower.readable()
    with pytest.raises(Purged) as fault:
        await tape.read()
    assert not isinstance(fault.value, Unread)


async def test_a_snapshot_of_another_record_at_the_tapes_end_is_passed_over() -> None:
    """The tape lost its last record and went on with another one: the snapshot leads nowhere."""
    bus = MemoryBus(MemoryBroker(), "s")
    await stream(bus)
    tape = Tape(bus, "r")
    for number in (1, 2):
        await tape.append(term(number, "s"))
    meta = {"seq": 2, "epoch": 0, "tail": ["term", 7]}
    lost: Any = FoundState(meta, None, "own snapshot")  # type: ignore[arg-type]
    own, removed = [lost, None], list[int]()
    finder: Any = SimpleNamespace(
        own=lambda: (own.pop(0), []), snapshots=SimpleNamespace(remove=removed.append)
    )
    follower = Follower(SPEC, bus, tape, finder)
    await follower.load()
    assert removed == [2] and follower.history.seq == 0 and not own


async def test_time_without_the_bus_is_no_time_without_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those who come back with it may have the state, and need a moment to say so."""
    together = Together("s1")
    found = together.stuck("s1")

    async def away(*_: object) -> list[Any]:
        raise Unavailable("the bus is away")

    async def nobody_asked(*_: object) -> None: ...

    monkeypatch.setattr(stuck, "readable_at", nobody_asked)
    monkeypatch.setattr(stuck, "other_syncers", together.others)
    assert await found._why_not_begin_again(3) == ""
    monkeypatch.setattr(stuck, "other_syncers", away)
    assert "does not answer" in await found._why_not_begin_again(3)
    monkeypatch.setattr(stuck, "other_syncers", together.others)
    assert (await found._why_not_begin_again(3)).startswith("in 3 s it begins")


async def test_who_read_up_before_the_server_began_anew_cannot_be_sure_of_it() -> None:
    """Contributions that it has merged may be lost, unless its own snapshot covers them."""
    bus = MemoryBus(MemoryBroker(), "s")
    await stream(bus)
    await bus.ensure_stream(StreamSpec(subjects.dn_stream("r"), ("dn.r.>",), 1 << 20))
    finder: Any = SimpleNamespace(snapshots=None)
    follower = Follower(SPEC, bus, Tape(bus, "r"), finder)
    assert not (await follower.recovered()).unsure
    bus.broker.restart()
    assert (await follower.recovered()).unsure
    bus.broker.nodes = 3
    assert not (await follower.recovered()).unsure, "one of them loses nothing"
