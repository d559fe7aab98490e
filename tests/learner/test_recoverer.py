"""What a recovery carries out: initial parameters, several fragments under way at a time."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from learner.contexts import uplink
from learner.rig import START
from waiting import until

from diloco_learner.events import (
    AnchorReady,
    Begin,
    CheckpointLoaded,
    GrantSeen,
    InitMoved,
    Leave,
    LoadState,
    SendInit,
    SendJoin,
    StateBad,
    TimePassed,
)
from diloco_learner.exchange.uplink_io import Uplink
from diloco_learner.recovery import checkpoint_io, recoverer_io
from diloco_learner.recovery.checkpoint_io import sequence_of
from diloco_learner.recovery.moments import Received
from diloco_learner.recovery.recoverer_io import Recoverer
from diloco_learner.recovery.recovery import OwnModel, Recovery
from diloco_learner.training.train import Anchored
from diloco_shared.bus.port import Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import Grant, Join, Restored
from diloco_shared.protocol.wire import decode
from diloco_shared.spec.run import RunSpec
from diloco_simulator.hub.broker import Fate, MemoryBroker

FRAGMENTS = 6
# Of a learner whose hub was put back from a backup.
LATE_LIFE = 28_800_000


class Asked:
    """A recovery that is asked for its initial parameters once, and leaves when it is told to."""

    deadline = None
    awaited = None

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.asked = False

    def handle(self, event: Any, now: float) -> list[Any]:
        if isinstance(event, Leave):
            return [event]
        effects = [] if self.asked else [SendInit()]
        self.asked = True
        return effects


@pytest.fixture
def up(broker: MemoryBroker, spec: RunSpec, tmp_path: Path) -> Uplink:
    return uplink(broker, spec, tmp_path, (4,) * FRAGMENTS)


def sending(up: Uplink, spec: RunSpec) -> Recoverer:
    """One that makes initial parameters of any values."""
    program = SimpleNamespace(layout=SimpleNamespace(fragments=range(FRAGMENTS), tensors=()))
    trainer: Any = SimpleNamespace(program=program, initial_fragment=lambda p: np.zeros(4, "f4"))
    down: Any = SimpleNamespace(put=lambda event: None)
    asked: Any = Asked(spec)
    return Recoverer(asked, trainer, up.checkpoints, up.control, up, down, asyncio.Queue())


async def test_initial_fragments_do_not_wait_for_the_manifest_before(
    up: Uplink,
    syncer: Any,
    spec: RunSpec,
    broker: MemoryBroker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no more of them are made ahead than may lie in the host's memory."""
    monkeypatch.setattr(recoverer_io, "LOOK_S", 0.001)
    await syncer.prepare()
    stream = subjects.up_stream("r")
    where = [subjects.initial("r", "a", 1, p) for p in range(FRAGMENTS)]
    away = {where[0] + ".m", where[1] + ".m", where[2] + ".m"}
    made: list[int] = []

    def fault(client: str, operation: str, subject: str) -> Fate:
        return "lose_request" if client == "a" and subject in away else "deliver"

    def fragment(p: int) -> Any:
        made.append(p)
        return np.full(4, p, np.float32)

    async def stored(subject: str) -> None:
        while True:
            if await syncer.bus.last(stream, subject) is not None:
                return
            await asyncio.sleep(0)

    broker.fault = fault
    program = SimpleNamespace(layout=SimpleNamespace(fragments=range(FRAGMENTS), tensors=()))
    trainer: Any = SimpleNamespace(program=program, initial_fragment=fragment)
    events: asyncio.Queue[Any] = asyncio.Queue()
    told: list[Any] = []
    down: Any = SimpleNamespace(put=told.append)
    asked: Any = Asked(spec)
    bringing = Recoverer(asked, trainer, up.checkpoints, up.control, up, down, events)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(bringing.run())
        await stored(where[2])
        assert made == [0, 1, 2], "none of their manifests is there"
        away.clear()
        for name in where:
            await stored(name + ".m")
        events.put_nowait(Leave("withdrawn", "enough"))
    assert made == list(range(FRAGMENTS))
    assert told and all(isinstance(event, InitMoved) for event in told)


async def test_fragments_that_are_there_are_not_made_again(
    up: Uplink, syncer: Any, spec: RunSpec
) -> None:
    """Of several hosts each would give its share of all of them once more."""
    await syncer.prepare()
    for p in range(FRAGMENTS):
        await syncer.bus.append(subjects.initial("r", "a", 1, p) + ".m", b"m")
    program = SimpleNamespace(layout=SimpleNamespace(fragments=range(FRAGMENTS), tensors=()))
    trainer: Any = SimpleNamespace(program=program)  # which makes none
    told: list[Any] = []
    down: Any = SimpleNamespace(put=told.append)
    events: asyncio.Queue[Any] = asyncio.Queue()
    asked: Any = Asked(spec)
    bringing = Recoverer(asked, trainer, up.checkpoints, up.control, up, down, events)
    async with asyncio.TaskGroup() as bringing.tasks:
        await bringing._send_init()
    assert told == [], "nothing of them is on its way"


@pytest.mark.virtual
async def test_one_look_that_nobody_answers_ends_no_fragment_that_is_being_sent(
    up: Uplink, syncer: Any, spec: RunSpec, broker: MemoryBroker
) -> None:
    """Their chunks would be sent once more, and lie twice on the stream."""
    await syncer.prepare()
    stream = subjects.up_stream("r")
    looks = 0

    def fault(client: str, operation: str, subject: str) -> Fate:
        nonlocal looks
        look = (client, operation, subject) == ("a", "api", stream)
        looks += look
        # Each fragment is looked for before it is made, and once more before it is sent.
        return "lose_answer" if look and looks in (4, 6) else "deliver"

    broker.fault = fault
    bringing = sending(up, spec)
    async with asyncio.TaskGroup() as bringing.tasks:
        await bringing._send_init()
    looks = 99
    held = await syncer.bus.held(stream, "up.r.a.init.>", messages_max=99)
    names = {subjects.initial("r", "a", 1, p) for p in range(FRAGMENTS)}
    assert held.keys() == names | {f"{name}.m" for name in names}
    assert all(what.messages == 1 for what in held.values())


async def test_a_fragment_that_cannot_be_sent_ends_no_other(
    up: Uplink, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for again, and those that are there are not sent again then."""
    sent: list[int] = []

    async def initial(layout: Any, p: int, payload: Any, stored: Any) -> None:
        if p < recoverer_io.INIT_AHEAD:
            raise Unavailable("a host does not keep that any more")
        sent.append(p)

    async def has_initial(p: int) -> bool:
        return False

    monkeypatch.setattr(up, "initial", initial)
    monkeypatch.setattr(up, "has_initial", has_initial)
    bringing = sending(up, spec)
    async with asyncio.TaskGroup() as bringing.tasks:
        await bringing._send_init()
    assert sent == list(range(recoverer_io.INIT_AHEAD, FRAGMENTS))


@pytest.mark.parametrize(("named", "unsigned"), [(False, [2, 7]), (True, [])])
async def test_a_join_that_nobody_answers_is_said_where_an_older_syncer_hears_it(
    up: Uplink,
    spec: RunSpec,
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
    unsigned: list[int],
) -> None:
    """Syncers of release 0.2 hear no learner's own subject, and have no credentials. Said each
    time, all joins would come twice to a syncer that cannot answer, its link narrow as it is."""
    monkeypatch.setattr(type(up.control), "named", property(lambda _: named))
    heard: list[str] = []
    join = Join(learner="a", incarnation=1, nonce="x", config={})

    class Joining(Asked):
        def handle(self, event: Any, now: float) -> list[Any]:
            return [event] if isinstance(event, Leave) else [SendJoin(join)]

    async def listen() -> None:
        async with up.control.subscribe("ctl.r.>") as deliveries:
            async for delivery in deliveries:
                assert decode(delivery.payload, Join) == join
                heard.append(delivery.subject)
                over = len(heard) >= 8
                events.put_nowait(Leave("stopped", "heard") if over else TimePassed())

    events: asyncio.Queue[Any] = asyncio.Queue()
    asked: Any = Joining(spec)
    down: Any = SimpleNamespace(put=events.put_nowait)
    listening = asyncio.create_task(listen())
    await asyncio.sleep(0)
    trainer: Any = SimpleNamespace()
    joining = Recoverer(asked, trainer, up.checkpoints, up.control, up, down, events)
    assert isinstance(await joining.run(), Leave)
    listening.cancel()
    own = subjects.join("r", "a")
    other = subjects.unsigned_join("r")
    assert heard[:8] == [other if n in unsigned else own for n in range(8)]


async def test_of_each_fragment_the_newest_anchor_is_held_which_it_begins_with(
    up: Uplink, spec: RunSpec
) -> None:
    """Each of them all are 4 bytes x N, beside those of the book."""
    bringing = sending(up, spec)
    for epoch, version in ((0, 7), (1, 0), (0, 8), (1, 1)):
        for p in range(2):
            ready = AnchorReady(epoch, p, version, version, START, {})
            bringing._handle(Anchored(ready, np.full(4, 10 * epoch + version, "f4")))
            assert len([key for key in bringing.anchors if key[1] == p]) == 1
    begun = bringing._begin_with(Begin(1, 1, (1, 1), START))
    assert [anchor_F[0] for anchor_F in begun] == [11.0, 11.0]


async def test_moments_of_a_donor_are_told_as_they_came_and_not_read_back(
    up: Uplink, spec: RunSpec
) -> None:
    """Those of a large model take a minute to read, before the first step."""
    loaded: list[bytes] = []
    trainer: Any = SimpleNamespace(load_inner_state=loaded.append)  # nothing else is asked of it
    down: Any = SimpleNamespace(states={"n": Received(b"moments", "d" * 32)})
    asked: Any = Asked(spec)
    bringing = Recoverer(asked, trainer, up.checkpoints, up.control, up, down, asyncio.Queue())
    await bringing._load_state(LoadState("donor", "b", "n"))
    assert (loaded, down.states) == ([b"moments"], {}), "its memory is let go"
    assert bringing.loaded == {"moments": "d" * 32}


class OwnCheckpoints:
    """A learner's own, the newest of this epoch; None: it has none."""

    def __init__(self, epoch: int | None) -> None:
        self.newest = None if epoch is None else sequence_of(epoch, LATE_LIFE, 7)
        self.room = SimpleNamespace(needed=8)

    def restore(self, trainer: Any) -> tuple[bool, list[str]]:
        if self.newest is not None:
            trainer.load_inner_state("its own")
        return self.newest is not None, ["checkpoint 7 passed over: torn"]


@pytest.mark.parametrize(
    ("own_epoch", "restored", "kept", "loaded"),
    [
        (None, None, "kept", []),
        (0, None, "kept", ["its own"]),
        (1, 2, "kept", ["kept"]),  # of a history that was left
        (2, 2, "kept", ["its own"]),  # newer than what its history began with
        (None, 2, "kept", ["kept"]),
        (1, 2, None, ["its own"]),  # there is no part that it could use
        (None, 2, None, []),
    ],
)
async def test_moments_are_those_of_the_restored_checkpoint_unless_its_own_are_newer(
    up: Uplink,
    spec: RunSpec,
    monkeypatch: pytest.MonkeyPatch,
    own_epoch: int | None,
    restored: int | None,
    kept: str | None,
    loaded: list[str],
) -> None:
    found: list[str] = []
    told: list[str] = []
    read = (kept, ["another one's part is damaged"])
    monkeypatch.setattr(recoverer_io, "read_part", lambda *_: read)
    monkeypatch.setattr(up, "tell_soon", lambda kind, text, data: told.append(text))
    trainer: Any = SimpleNamespace(load_inner_state=found.append, check_inner_state=None)
    asked: Any = Asked(spec)
    asked.learner = "a"
    own: Any = OwnCheckpoints(own_epoch)
    bringing = Recoverer(asked, trainer, own, up.control, up, SimpleNamespace(), asyncio.Queue())  # type: ignore[arg-type]
    source = None if restored is None else Restored(epoch=restored, serial=1, source="r.1/000001")
    await bringing._load_state(LoadState("checkpoint", "", "", source))
    assert found == loaded
    assert bringing.events.get_nowait() == CheckpointLoaded(none=not loaded), "which is told"
    skipped = "checkpoint 7 passed over: torn"
    assert (skipped in told) is (loaded != ["kept"])
    looked = restored is not None and own_epoch != restored
    assert ("another one's part is damaged" in told) is looked


async def test_a_checkpoint_of_the_run_that_nobody_can_read_in_time_is_passed_over(
    up: Uplink, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vault that hangs says nothing: the learner goes on with what it has itself."""
    found: list[str] = []
    told: list[str] = []
    answers = threading.Event()
    monkeypatch.setattr(checkpoint_io, "STORED_S_MIN", 0.01)
    monkeypatch.setattr(recoverer_io, "read_part", lambda *_: answers.wait())
    monkeypatch.setattr(up, "tell_soon", lambda kind, text, data: told.append(text))
    trainer: Any = SimpleNamespace(load_inner_state=found.append, check_inner_state=None)
    asked: Any = Asked(spec)
    asked.learner = "a"
    own: Any = OwnCheckpoints(1)
    bringing = Recoverer(asked, trainer, own, up.control, up, SimpleNamespace(), asyncio.Queue())  # type: ignore[arg-type]
    source = Restored(epoch=2, serial=1, source="r.1/000001")
    try:
        await bringing._load_state(LoadState("checkpoint", "", "", source))
    finally:
        answers.set()
    assert found == ["its own"]
    assert told[0].startswith("r.1/000001 is passed over: the place did not answer within")


class Giving:
    """A downlink whose inner states are on their way for ever; says which those are."""

    def __init__(self) -> None:
        self.coming: list[tuple[str, str]] = []
        self.states: dict[str, Received] = {}

    async def state(self, donor: str, nonce: str) -> None:
        self.coming.append((donor, nonce))
        try:
            await asyncio.Event().wait()
        finally:
            self.coming.remove((donor, nonce))


def granting(recovery: Recovery, donor: str) -> GrantSeen:
    return GrantSeen(
        Grant(
            learner="a",
            incarnation=1,
            nonce=recovery.nonce,
            accepted=True,
            reason="welcome",
            epoch=0,
            term=1,
            versions=(5,) * recovery.spec.algorithm.fragments,
            donor=donor,
            stamp=START,
        )
    )


@pytest.mark.parametrize("next_donor", ["", "c", "b"])  # of b the newcomer takes nothing more
async def test_nothing_more_is_fetched_of_a_donor_that_is_not_waited_for(
    up: Uplink, spec: RunSpec, next_donor: str
) -> None:
    """Its state would come beside the anchors, and lie beside the moments that are loaded."""
    down: Any = Giving()
    trainer: Any = SimpleNamespace()
    recovery = Recovery(
        spec, "a", 1, OwnModel("d"), has_checkpoint=False, nonce_seed="n", initial=False
    )
    bringing = Recoverer(recovery, trainer, up.checkpoints, up.control, up, down, asyncio.Queue())
    async with asyncio.TaskGroup() as bringing.tasks:
        bringing._handle(granting(recovery, "b"))
        await until(lambda: down.coming == [("b", "n-1")])
        down.states = {"n-1": Received(b"whole, and not yet told", "d" * 32)}
        bringing._handle(StateBad("b", "n-1", "rubbish"))
        await until(lambda: not down.coming)
        assert down.states == {}
        bringing._handle(granting(recovery, next_donor))
        await asyncio.sleep(0)
        assert down.coming == ([("c", "n-2")] if next_donor == "c" else [])
        if bringing.state is not None:
            bringing.state.cancel()
