"""The network of worlds: what one connection carries arrives in its order, whatever it meets."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from diloco_simulator.hub.net import GIVEN_UP_S, RETRY_S, Net, Way
from diloco_simulator.virtual_loop import VirtualLoop, play
from diloco_simulator.worlds.options import Options

# Each way takes exactly so long, in virtual seconds.
DELAY_S = 0.1
Arrived = list[tuple[float, str]]


class Desk:
    """A network without jitter, and when what arrived."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.net = Net(loop, Random(1), Options.calm(delay_s=DELAY_S, in_order=True), Counter())
        self.net.faulty = False
        self.arrived: Arrived = []

    def way(self, machine: str = "a") -> Way:
        return Way(self.net.link(machine), out=True)

    def send(self, way: Way, what: str, *, sure: bool = False) -> None:
        arrive = lambda: self.arrived.append((round(self.loop.now, 3), what))  # noqa: E731
        self.net.send(way, 1, arrive, sure=sure)

    @property
    def order(self) -> str:
        return "".join(what for _, what in self.arrived)


def played(story: Callable[[Desk], Awaitable[None]]) -> Desk:
    async def main() -> Desk:
        desk = Desk()
        await story(desk)
        return desk

    return play(main(), Random(1))


@pytest.mark.parametrize(("in_order", "order"), [(True, "abcd"), (False, "cbad")])
def test_what_met_a_cut_arrives_before_what_was_sent_after_it(in_order: bool, order: str) -> None:
    """In older worlds each tries by itself, and the turn of another one may come first."""

    async def story(desk: Desk) -> None:
        desk.net.in_order = in_order
        way = desk.way()
        way.link.out = False
        desk.send(way, "a")
        await asyncio.sleep(0.8 * RETRY_S)
        desk.send(way, "b")
        await asyncio.sleep(0.5 * RETRY_S)
        way.link.out = True
        desk.send(way, "c")
        await asyncio.sleep(3 * RETRY_S)
        desk.send(way, "d")
        await asyncio.sleep(1.0)

    assert played(story).order == order


def test_what_waited_for_too_long_never_arrives_but_what_is_sure_does() -> None:
    async def story(desk: Desk) -> None:
        way = desk.way()
        way.link.out = False
        desk.send(way, "a")
        desk.send(way, "b", sure=True)
        await asyncio.sleep(0.5 * GIVEN_UP_S)
        desk.send(way, "c")
        await asyncio.sleep(0.5 * GIVEN_UP_S + 2 * RETRY_S)
        way.link.out = True
        await asyncio.sleep(2 * RETRY_S)

    assert played(story).order == "bc"


def test_what_was_sent_to_a_hub_that_lost_its_disk_does_not_come_to_the_next() -> None:
    async def story(desk: Desk) -> None:
        way = desk.way()
        way.link.out = False
        desk.send(way, "a")
        await asyncio.sleep(1.0)
        desk.net.lives += 1
        desk.send(way, "b")
        way.link.out = True
        await asyncio.sleep(1.0)

    assert played(story).order == "b"


def test_a_clogged_way_holds_all_until_it_is_released_and_others_overtake_it() -> None:
    async def story(desk: Desk) -> None:
        clogged, other = desk.way(), desk.way("b")
        desk.net.clog(clogged)
        for what in "ab":
            desk.send(clogged, what)
        await asyncio.sleep(2 * RETRY_S)
        desk.send(other, "c")
        await asyncio.sleep(1.0)
        assert desk.order == "c"
        assert desk.net.release(clogged) == 2 and desk.order == "cab"
        assert desk.net.release(clogged) == 0
        desk.send(clogged, "d")
        await asyncio.sleep(1.0)

    found = played(story)
    assert found.order == "cabd"
    assert found.arrived[-1][0] == round(2 * RETRY_S + 1.0 + DELAY_S, 3)


def test_a_clog_that_is_released_behind_a_cut_waits_for_its_end() -> None:
    async def story(desk: Desk) -> None:
        way = desk.way()
        desk.net.clog(way)
        desk.send(way, "a")
        await asyncio.sleep(1.0)
        way.link.out = False
        assert desk.net.release(way) == 0
        desk.net.heal()
        await asyncio.sleep(2 * RETRY_S)

    assert played(story).order == "a"


def test_a_healed_network_holds_nothing() -> None:
    async def story(desk: Desk) -> None:
        ways = [desk.way(name) for name in "abc"]
        for way in ways:
            desk.net.clog(way)
            desk.send(way, "x")
        await asyncio.sleep(1.0)
        desk.net.heal()
        assert desk.order == "xxx" and not desk.net.clogged

    played(story)
