"""Standbys that cannot execute the tape: what they show while they look for a way on."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from syncer.test_standby import SPEC

from diloco_syncer.edges import stuck
from diloco_syncer.edges.stuck import Stuck


class Reading:
    """A follower that reads what is published until everybody else reads too."""

    def __init__(self, together: "Together") -> None:
        self.together = together
        self.history = SimpleNamespace(seq=3)

    async def begin_again(self, known: object, why: str) -> None:
        self.together.reading += 1
        if self.together.reading == len(self.together.states):
            self.together.all_read.set()
        await self.together.all_read.wait()


class Together:
    """Syncers of one shard, and the states that they show."""

    def __init__(self, *names: str) -> None:
        self.states = dict.fromkeys(names, "ineligible")
        self.reading, self.all_read = 0, asyncio.Event()

    def stuck(self, name: str) -> Stuck:
        keeper: Any = SimpleNamespace(lease=SimpleNamespace(me=name), elsewhere="")
        nothing: Any = None

        def show(state: str, why: str, seq: int) -> None:
            self.states[name] = state

        found = Stuck(SPEC, 0, keeper, nothing, nothing, nothing, show, nothing)
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
