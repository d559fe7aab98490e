"""The data client of worlds of whole processes: its connections do not wait for each other."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.data_bus import DataBus, DataTroubles, is_chunk
from diloco_simulator.hub.net import Net, Way
from diloco_simulator.inside import leaders
from diloco_simulator.inside.observer import Scene
from diloco_simulator.troubles.chance import Chance
from diloco_simulator.virtual_loop import VirtualLoop, play
from diloco_simulator.worlds import world
from diloco_simulator.worlds.options import THIN_LINKS, Options


def test_only_chunks_take_a_connection_of_their_own() -> None:
    assert is_chunk("up.sim.a.0.1.2.3") and is_chunk("state.sim.a.b.n")
    for subject in ("up.sim.a.0.1.2.3.m", "state.sim.a.b.n.a", "tape.sim.0", "ev.sim.refused"):
        assert not is_chunk(subject)


async def data_bus() -> tuple[VirtualLoop, DataBus]:
    """A data client of a calm world, and the world's loop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    options, broker = Options.calm(), MemoryBroker()
    scene = Scene(loop, options)
    net = Net(loop, Random(1), options, scene.counts)
    troubles = DataTroubles(options, Chance(scene, Random(1)), lambda s, p: p)
    bus = DataBus(broker, "a-data", "a", net, None, troubles)
    await bus.ensure_stream(StreamSpec("UP-sim", ("up.sim.>",), 10_000))
    return loop, bus


def test_a_later_payload_overtakes_one_on_a_slow_connection() -> None:
    """But what follows on the slow one does not."""

    async def main() -> tuple[list[str], list[str]]:
        loop, bus = await data_bus()
        stored: list[str] = []
        bus.broker.on_store = lambda stream, message: stored.append(message.subject)
        first, other = two_lanes(bus)
        bus._lane(first).out.arrived_at = loop.now + 3.0
        sent: list[Coroutine[Any, Any, int]] = [
            bus.append(subject, b"x") for subject in (first, first, other)
        ]
        await asyncio.gather(*sent)
        return stored, [other, first, first]

    stored, expected = play(main(), Random(1))
    assert stored == expected


def test_connections_that_break_fail_what_is_on_its_way_and_are_mended_together() -> None:
    """A payload's is given up at once, as on a socket that is reset; what is asked meanwhile
    waits."""

    async def main() -> tuple[float, int, list[int]]:
        loop, bus = await data_bus()
        chunk = "up.sim.a.0.0.1.1"
        began = loop.now
        sending = asyncio.create_task(bus.append(chunk, b"x", timeout_s=60.0))
        await asyncio.sleep(0)
        bus.breaks()
        with pytest.raises(Unavailable, match="was lost"):
            await sending
        gave_up_s = loop.now - began
        again = asyncio.create_task(bus.append(chunk, b"x", timeout_s=60.0))
        await asyncio.sleep(5.0)
        assert not again.done(), "it waits"
        bus.mended()
        return gave_up_s, await again, [b.reconnects for b in (bus, *bus.beside)]

    gave_up_s, seq, reconnects = play(main(), Random(1))
    assert gave_up_s == 0.0
    assert seq == 2, "what was on its way to the hub arrives"
    assert set(reconnects) == {1}


def two_lanes(bus: DataBus) -> tuple[str, str]:
    """Subjects whose payloads take different connections."""
    subjects = [f"up.sim.a.0.0.{n}.1" for n in range(9)]
    other = next(s for s in subjects if bus._lane(s) is not bus._lane(subjects[0]))
    return subjects[0], other


def test_what_is_overtaken_or_damaged_is_made_good() -> None:
    options = Options.calm(steps=18, safety_s=25.0, learners=2, quorum=1)
    found = world.one(6, options.changed(overtaken=0.3, corrupt=0.3))
    assert found.violations == [] and found.rounds > 0
    assert found.counts["overtaken"] and found.counts["corrupted"]


CALM = Options.calm(learners=4, syncers=2, fragments=3, steps=36, safety_s=25.0)


def test_the_thinnest_link_carries_what_every_process_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a third to spare. Over less nobody would stay a member, whatever the product does."""
    said = Counter[str]()  # in bytes, both ways, by machine
    send = Net.send

    def counted(
        net: Net, way: Way, size: int, arrive: Callable[[], object], *, sure: bool = False
    ) -> None:
        (machine,) = (name for name, link in net.links.items() if link is way.link)
        said[machine] += size
        send(net, way, size, arrive, sure=sure)

    monkeypatch.setattr(Net, "send", counted)
    found = world.one(5, CALM)
    assert found.violations == []
    assert min(THIN_LINKS) / 1.5 == 10_000, "docs/how-to/tuning.md says four to ten thousand"
    assert 4000 < max(said.values()) / found.virtual_s < min(THIN_LINKS) / 1.5
    learners = [said[f"learner-{n}"] / found.virtual_s for n in range(4)]
    assert min(learners) > 1000 and max(learners) < 2000, "docs/how-to/tuning.md says so"


@pytest.mark.long
def test_one_learner_behind_too_thin_a_link_slows_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/how-to/tuning.md says: 5,000 bytes a second are enough, and 1,500 are not."""
    delay_s, rates = Net._delay_s, [math.inf]

    def thin(net: Net, way: Way, size: int, now: float) -> float:
        took, link = delay_s(net, way, size, now), way.link
        if link is not net.links.get("learner-0") or rates[0] == math.inf:
            return took
        link.busy_until = max(link.busy_until, now) + size / rates[0]
        return took + link.busy_until - now

    monkeypatch.setattr(Net, "_delay_s", thin)
    # Its last words are under way for as long as its link is behind.
    monkeypatch.setattr(leaders, "LATE_DELAYS", 200)
    seconds = {}
    for rate in (math.inf, 5000.0, 1500.0):
        rates[0] = rate
        found = world.one(5, CALM.changed(syncers=1))
        assert found.violations == []
        seconds[rate] = found.virtual_s
    # Its first answer is awaited for as long as a few steps take; after that nobody waits for it.
    assert seconds[5000.0] < 1.1 * seconds[math.inf]
    assert seconds[1500.0] > 4 / 3 * seconds[math.inf]
