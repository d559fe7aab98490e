"""Worlds of whole processes: the product from its entry on, killed and frozen, and checked."""

import asyncio
from random import Random
from typing import Any

import pytest

from diloco_simulator.virtual_loop import Hosted, VirtualLoop, play
from diloco_simulator.worlds import watched_run, world
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_syncer.messages.outbox_io import Outbox


def test_a_seed_is_a_run() -> None:
    one, again = world.one(11), world.one(11)
    assert (one.counts, one.rounds, one.virtual_s) == (again.counts, again.rounds, again.virtual_s)


def test_what_is_stored_and_when_is_the_same_in_each_play(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in one process, where nothing lies at the same place in memory twice. In this world a
    syncer waits for several answers when it loses its connection."""
    seen, stored = list[tuple[Any, ...]](), world.World._stored

    def noted(of: world.World, stream: str, message: Any) -> None:
        seen.append((of.loop.now, stream, message.subject, message.seq))
        stored(of, stream, message)

    monkeypatch.setattr(world.World, "_stored", noted)
    plays = list[list[tuple[Any, ...]]]()
    for _ in range(4):
        world.played(Case.drawn(1010, Options.drawn(1010)))
        plays.append(seen.copy())
        seen.clear()
    assert plays[0] and all(play == plays[0] for play in plays)


def test_a_hub_that_exchanges_its_leader_has_several_nodes_and_may_lose_all_of_them() -> None:
    drawn = [Options.drawn(seed) for seed in range(1000)]
    several = [options for options in drawn if options.nodes > 1]
    assert several == [options for options in drawn if options.elections]
    assert 0.05 < sum(options.hub_restores for options in several) / len(several) < 0.4


def test_a_fault_of_the_product_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication whose digest is not that of what it publishes."""
    publish = Outbox.publish

    async def wrongly(self: Outbox, *args: object, **kwargs: object) -> None:
        effect, payload, codec, size, digest, *rest = args
        await publish(self, effect, payload, codec, size, digest[::-1], *rest, **kwargs)  # type: ignore

    monkeypatch.setattr(Outbox, "publish", wrongly)
    monkeypatch.setattr(watched_run, "LIVENESS_S", 60.0)
    assert any("liveness" in violation for violation in world.one(1).violations)


def test_what_a_killed_process_leaves_is_collected_without_a_word() -> None:
    """Long after its world, by whatever is at work then."""
    loop = VirtualLoop(Random(1))
    assert loop.remove_signal_handler(15) is False
    with pytest.raises(AssertionError, match="only processes of a world"):
        loop.add_signal_handler(15, print)
    loop.close()


def test_what_is_killed_never_runs_again_and_what_is_frozen_goes_on() -> None:
    said: list[str] = []

    async def speak(name: str) -> None:
        try:
            while True:
                await asyncio.sleep(1.0)
                said.append(name)
        finally:
            said.append(f"{name} ends")

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        killed, frozen = Hosted(loop, "killed"), Hosted(loop, "frozen")
        killed.run(speak("killed"))
        frozen.run(speak("frozen"))
        await asyncio.sleep(1.5)
        killed.kill()
        frozen.freeze()
        await asyncio.sleep(10.0)
        frozen.thaw()
        await asyncio.sleep(1.2)
        return list(said)

    # What fell due in a standstill comes once, as with a process that was stopped.
    assert play(main(), Random(1)) == ["killed", "frozen", "frozen", "frozen"]
    assert sorted(said[4:]) == ["frozen ends", "killed ends"], "closed when the world is over"
