"""Initial parameters on their way in: fetched as they come, kept, freed, and healed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from waiting import until

from diloco_shared.bus import blobs
from diloco_shared.bus.blobs import manifest_subject, put_blob
from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_shared.numerics import codec
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import cut
from diloco_shared.protocol.messages import Blob, InitManifest, TensorSpec
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.run import RunSpec, config_hash
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import Event, InitMoved, InitSeen, Malformed
from diloco_syncer.leadership import initial_parameters_io as initial
from diloco_syncer.leadership.initial_parameters_io import InitialSets
from diloco_syncer.merging.payloads_io import Payloads
from diloco_syncer.status.announce import INITIALIZER_S

TENSORS = tuple(TensorSpec(name=f"t{n}", shape=(4,), embedding=False) for n in range(3))
pytestmark = pytest.mark.virtual

SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "algorithm": {"fragments": 3, "sync_every_steps": 12},
        "budget": {"steps": 120},
    }
)

# Several times what the slowest of these waits for: the silence of `rig`.
PATIENCE_S = 15.0


def encoded(value: float) -> bytes:
    """A fragment of that value alone."""
    return bytes(codec.encode("fp32", np.full(4, value, np.float32)))


class Rig:
    """A learner's side and a shard's side of one bus."""

    def __init__(self) -> None:
        broker = MemoryBroker()
        self.bus, self.data = MemoryBus(broker, "learner"), MemoryBus(broker, "syncer")
        self.room = 1 << 20
        self.payloads = Payloads(lambda: self.room)
        self.events: list[Event] = []
        self.begun = False
        self.life = 0  # of a, which is asked for them
        self.strangers: set[str] = set()  # whom nobody asked
        self.stream = subjects.up_stream("r")

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        await self.bus.ensure_stream(StreamSpec(self.stream, ("up.r.>",), 1 << 20))
        sets = InitialSets(
            SPEC,
            range(3),
            self.data,
            self.payloads,
            self.events.append,
            lambda: self.begun,
            lambda learner: learner not in self.strangers,
            lambda: ("a", self.life),
        )
        task = asyncio.create_task(sets.work())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def where(self, learner: str, p: int, life: int = 0) -> str:
        return subjects.initial("r", learner, life, p)

    async def manifest(self, learner: str, p: int, blob: Blob, life: int = 0) -> None:
        m = InitManifest(
            run="r",
            learner=learner,
            incarnation=life,
            config_hash=config_hash(SPEC),
            layout=TENSORS,
            fragment=p,
            blob=blob,
        )
        await self.bus.append(manifest_subject(self.where(learner, p, life)), encode(m))

    async def send(self, learner: str, p: int, value: float = 1.0, life: int = 0) -> None:
        blob = await put_blob(self.bus, self.where(learner, p, life), encoded(value))
        await self.manifest(learner, p, blob, life)

    async def hollow(self, learner: str, p: int, size: int = 20) -> None:
        """A manifest whose chunks nobody has sent."""
        await self.manifest(learner, p, cut(self.where(learner, p), bytes(size)).blob)

    async def there(self, learner: str, p: int) -> bool:
        """Whether the stream has the manifest."""
        name = manifest_subject(self.where(learner, p))
        return await self.bus.last(self.stream, name) is not None

    def held(self) -> list[str]:
        return sorted(self.payloads.held)

    def all(self, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setattr(initial, "LOOK_S", 0.01)
    monkeypatch.setattr(blobs, "LOOK_S", 0.01)
    monkeypatch.setattr(blobs, "silence_s", lambda _: 2.0)
    return Rig()


async def test_each_fragment_is_fetched_while_the_rest_is_being_sent(rig: Rig) -> None:
    async with rig.working():
        for p in range(2):
            await rig.send("a", p)
            await until(lambda p=p: rig.where("a", p) in rig.payloads.held)
        assert not rig.all(InitSeen)
        await rig.send("a", 2)
        await until(lambda: rig.all(InitSeen))
        (seen,) = rig.all(InitSeen)
        assert (seen.learner, seen.finite) == ("a", True)
        assert rig.held() == sorted(seen.subjects)


async def test_nothing_is_fetched_of_whom_nobody_asked(rig: Rig) -> None:
    """Else whoever may write to the stream would choose the model that a run begins with."""
    rig.strangers = {"thief", "b"}
    async with rig.working():
        for learner in ("thief", "b"):
            for p in range(3):
                await rig.send(learner, p)
        await until(lambda: any("thief" in e.senders for e in rig.all(InitMoved)))
        await asyncio.sleep(1.0)
        assert not rig.held() and not rig.all(InitSeen)
        rig.strangers = {"thief"}  # b is asked now, and need not send anything again
        await until(lambda: rig.all(InitSeen))
        assert [seen.learner for seen in rig.all(InitSeen)] == ["b"]
        assert not any("thief" in key for key in rig.held())


async def test_sets_of_strangers_push_out_nobodys_that_was_asked(rig: Rig) -> None:
    rig.strangers = {f"s{n}" for n in range(20)}
    async with rig.working():
        await rig.send("a", 0)
        for name in sorted(rig.strangers):
            await rig.send(name, 0)
        for p in (1, 2):
            await rig.send("a", p)
        await until(lambda: rig.all(InitSeen))


async def test_a_shard_that_starts_in_the_middle_finds_what_is_there(rig: Rig) -> None:
    async with rig.working():
        for p in range(2):
            await rig.send("a", p)
        await until(lambda: len(rig.held()) == 2)
    rig.payloads, rig.events = Payloads(lambda: 1 << 20), []
    async with rig.working():
        await rig.send("a", 2)
        await until(lambda: rig.all(InitSeen))


async def test_another_initializer_takes_nothing_away_until_it_has_sent_all(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, drop = list[str](), rig.payloads.drop

    def dropped(key: str) -> bytes | None:
        let_go.extend([key] if key in rig.payloads.held else [])
        return drop(key)

    monkeypatch.setattr(rig.payloads, "drop", dropped)
    async with rig.working():
        await rig.send("a", 0)
        await until(lambda: len(rig.held()) == 1)
        for p in range(2):
            await rig.send("b", p)
        await rig.send("a", 1)
        await until(lambda: len(rig.held()) == 2)
        assert rig.held() == [rig.where("a", 0), rig.where("a", 1)]
        assert let_go == [], "what is held was never given up and fetched again"
        await rig.send("b", 2)
        await until(lambda: rig.all(InitSeen))
        assert rig.all(InitSeen)[0].learner == "b"
        # What is held beside the set that was handed on is the other's, fetched again.
        await until(lambda: len(rig.held()) == 5)
        rig.begun = True
        await until(lambda: len(rig.held()) == 3)


async def test_what_the_stream_does_not_hold_is_taken_off_and_the_rest_stays(rig: Rig) -> None:
    async with rig.working():
        await rig.send("a", 0)
        await rig.send("a", 1)
        await rig.hollow("a", 2)
        await until(lambda: rig.all(Malformed))
        await until(lambda: gone(rig, "a", 2), "the end of the manifest")
        fetched = rig.data.traffic.bytes_in
        await rig.send("a", 2)
        await until(lambda: rig.all(InitSeen))
        assert len(rig.held()) == 3
        assert rig.data.traffic.bytes_in - fetched < 2 * 1024, "only that one was fetched"


async def gone(rig: Rig, learner: str, p: int) -> bool:
    return not await rig.there(learner, p)


async def test_a_set_of_which_nothing_is_there_gives_way_to_one_that_was_sent_meanwhile(
    rig: Rig,
) -> None:
    """Nobody sends again what is on the stream: no manifest comes that would bring it up."""
    async with rig.working():
        for p in range(3):
            await rig.hollow("a", p)
        for p in range(3):
            await rig.send("b", p)
        assert not rig.all(Malformed), "a's were not waited for"
        await until(lambda: rig.all(InitSeen), patience_s=PATIENCE_S)
        assert rig.all(InitSeen)[0].learner == "b"
        assert await rig.there("b", 0)


async def test_a_set_that_lacks_one_fragment_gives_way_too_and_comes_back(rig: Rig) -> None:
    async with rig.working():
        for p in range(2):
            await rig.send("a", p)
        await rig.hollow("a", 2)
        for p in range(3):
            await rig.send("b", p)
        await until(lambda: rig.all(InitSeen), patience_s=PATIENCE_S)
        assert rig.all(InitSeen)[0].learner == "b"
        assert rig.where("a", 0) not in rig.all(InitSeen)[0].subjects
        await rig.send("a", 2)  # should nobody have taken b's
        await until(lambda: len(rig.all(InitSeen)) == 2, patience_s=PATIENCE_S)
        assert rig.all(InitSeen)[1].learner == "a"


async def test_a_set_that_there_is_no_room_for_gives_way_to_one_that_has_room(rig: Rig) -> None:
    """Which shows once it is here."""
    async with rig.working():
        for p in range(3):
            await rig.hollow("a", p, 1000)
        for p in range(3):
            await rig.send("b", p)
        assert not rig.all(Malformed), "a's were not waited for"
        rig.room = 500
        await put_blob(rig.bus, rig.where("a", 0), bytes(1000))
        await until(lambda: rig.all(InitSeen), patience_s=PATIENCE_S)
        assert rig.all(InitSeen)[0].learner == "b"
        # Of each fragment, once it is the only set again.
        assert {e.kind for e in rig.all(Malformed)} == {"no-room"}


async def test_what_is_not_whole_is_taken_off_whatever_the_hub_does_meanwhile(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sender looks whether the manifest is there, and this shard has read it already."""
    purge, asked = rig.data.purge, list[str]()

    async def at_the_second_attempt(stream: str, subject: str, **how: Any) -> int:
        asked.append(subject)
        if len(asked) == 1:
            raise Unavailable("the hub is away")
        return await purge(stream, subject, **how)

    monkeypatch.setattr(rig.data, "purge", at_the_second_attempt)
    async with rig.working():
        await rig.hollow("a", 0)
        await until(lambda: gone(rig, "a", 0), patience_s=PATIENCE_S)
        await rig.send("a", 0)
        await until(lambda: rig.held() == [rig.where("a", 0)], patience_s=PATIENCE_S)


async def test_what_is_damaged_is_held_no_longer(rig: Rig) -> None:
    """Whole, and yet no fragment in fp32."""
    async with rig.working():
        where = rig.where("a", 0)
        await rig.manifest("a", 0, await put_blob(rig.bus, where, b"seven b"))
        await until(lambda: rig.all(Malformed))
        assert rig.held() == [] and rig.payloads.bytes == 0


async def test_as_long_as_bytes_come_the_machine_is_told(rig: Rig) -> None:
    async with rig.working():
        for n in range(3):
            told = len(rig.all(InitMoved))
            await rig.bus.append(f"up.r.a.init.0.{n}", b"a chunk")
            await until(lambda told=told: len(rig.all(InitMoved)) > told)


async def test_only_what_the_initializer_stores_of_its_parameters_is_counted(rig: Rig) -> None:
    """Nor is what is fetched a second time more than what was there before."""
    async with rig.working():
        await rig.bus.append("up.r.a.0.0.0.1", b"a contribution")
        await rig.bus.append("up.r.b.init.0.0", b"a chunk")
        await until(lambda: rig.all(InitMoved))
        assert {e.stored for e in rig.all(InitMoved)} == {0}
        await rig.send("a", 0)
        size = len(encoded(1.0))
        await until(lambda: rig.all(InitMoved)[-1].here == size)
        before = rig.all(InitMoved)[-1].stored
        assert before > size
        for value in (2.0, 3.0):
            await rig.send("a", 0, value)
            await until(lambda v=value: rig.payloads.held.get(rig.where("a", 0)) == encoded(v))
        await until(lambda: rig.all(InitMoved)[-1].stored > 2 * before)
        assert rig.all(InitMoved)[-1].here == size


async def test_what_an_earlier_life_stored_is_not_counted(rig: Rig) -> None:
    """Each of them sends everything anew."""
    rig.life = 1
    async with rig.working():
        await rig.bus.append("up.r.a.init.0.0", b"a chunk")
        await until(lambda: rig.all(InitMoved))
        told = rig.all(InitMoved)[-1]
        assert (told.stored, told.life) == (0, 1)
        await rig.bus.append("up.r.a.init.0.1", b"a chunk")
        await until(lambda: rig.all(InitMoved)[-1].stored > 0)


async def test_what_a_new_life_sends_is_fetched_beside_what_was(rig: Rig) -> None:
    async with rig.working():
        await rig.send("a", 0)
        size = len(encoded(1.0))
        await until(lambda: rig.all(InitMoved) and rig.all(InitMoved)[-1].here == size)
        await rig.send("a", 0, 2.0, life=1)
        await until(lambda: rig.all(InitMoved)[-1].here == 2 * size)


async def test_what_was_counted_is_not_read_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model the headers alone take longer to read than an initializer has."""
    monkeypatch.setattr(initial, "COUNTED_AT_ONCE", 4)
    held, read = rig.data.held, list[int]()

    async def seen(*what: Any, start_seq: int, below_seq: int, **how: Any) -> Any:
        read.extend(range(start_seq, below_seq))
        return await held(*what, start_seq=start_seq, below_seq=below_seq, **how)

    monkeypatch.setattr(rig.data, "held", seen)
    await rig.bus.ensure_stream(StreamSpec(rig.stream, ("up.r.>",), 1 << 20))
    for _ in range(10):
        await rig.bus.append("up.r.a.init.0.0", b"a chunk")
    async with rig.working():
        await until(lambda: len(read) == 10)
        await rig.bus.append("up.r.a.init.0.0", b"a chunk")
        await until(lambda: len(read) == 11)
    assert read == list(range(1, 12))
    sizes = [e.stored for e in rig.all(InitMoved)]
    assert sizes == sorted(sizes) and sizes[-1] == (await rig.bus.stream_info(rig.stream)).bytes


async def test_after_a_long_count_more_is_told_of_before_the_initializer_is_passed_over(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = rig.data.held

    async def slow(*what: Any, **how: Any) -> Any:
        await asyncio.sleep(INITIALIZER_S / 3)
        return await held(*what, **how)

    monkeypatch.setattr(rig.data, "held", slow)
    async with rig.working():
        await rig.bus.append("up.r.a.init.0.0", b"a chunk")
        await until(lambda: rig.all(InitMoved), patience_s=INITIALIZER_S)
        before = rig.all(InitMoved)[-1].stored
        await rig.bus.append("up.r.a.init.0.0", b"a chunk")
        await until(lambda: rig.all(InitMoved)[-1].stored > before, patience_s=INITIALIZER_S)


async def test_values_that_are_not_finite_are_handed_on_as_such(rig: Rig) -> None:
    async with rig.working():
        for p in range(3):
            await rig.send("a", p, np.nan if p == 1 else 1.0)
        await until(lambda: rig.all(InitSeen))
        assert not rig.all(InitSeen)[0].finite
