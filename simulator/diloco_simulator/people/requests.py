"""Visitors whose requests are more than one: the same twice, nonsense, and copies that are kept.

Their dice are their own. What they begin is stopped and deleted once the world is healed.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_simulator.people.sequel import begun_with, removed

if TYPE_CHECKING:
    from diloco_simulator.people.visitors import Visitors

# How often a world has each kind.
OFTEN = 0.4
# A copy waits for a checkpoint this long, in looks of two virtual seconds.
LOOKS, LOOK_S = 20, 2.0
# More than a request may have.
TOO_LARGE = 1 << 20


class Requests:
    """Of one world."""

    def __init__(self, visitors: "Visitors") -> None:
        self.visitors = visitors
        self.world = visitors.world
        self.rng = Random(f"requests {visitors.world.seed}")
        self.begun: list[str] = []  # names of runs, to be removed
        self.turn = asyncio.Lock()  # nothing is begun while what was begun is removed

    def plan(self) -> None:
        """Draw who comes when."""
        for kind in (self.repeats, self.talks_nonsense, self.harms_twice, self.keeps_a_copy):
            if self.rng.random() < OFTEN:
                at = self.rng.uniform(3.0, self.world.options.safety_s)
                self.come(kind, at)

    def come(self, kind: Callable[[], Coroutine[Any, Any, None]], after_s: float = 0.0) -> None:
        """One of a kind, some time later; counted, unless the world is healed by then."""

        def come() -> None:
            if self.world.scene.faulty:
                self.visitors.counts[f"visitors: {kind.__name__}"] += 1
                self.visitors.begin(kind())

        self.world.loop.call_later(after_s, come)

    @asynccontextmanager
    async def beginning(self, kind: str) -> AsyncIterator[dict[str, Any] | None]:
        """What to submit: another run like the world's own, to be removed; None: it is too late."""
        async with self.turn:
            if not self.world.scene.faulty:
                yield None
                return
            name = f"{kind}-{self.rng.randrange(1000)}"
            self.begun.append(name)
            yield self.world.spec.model_dump(mode="json", exclude={"id"}) | {"name": name}

    async def remove(self) -> None:
        """Whatever was begun."""
        async with self.turn:
            while self.begun:
                await removed(self.visitors, self.begun.pop())

    # --- kinds ---------------------------------------------------------------------------------

    async def repeats(self) -> None:
        """A submission under one key is one run, however often it comes; another one is refused."""
        async with self.beginning("twice") as body:
            if body is not None:
                await self._repeated(body)

    async def _repeated(self, body: dict[str, Any]) -> None:
        ask, key = self.visitors.ask, {"Idempotency-Key": body["name"]}
        # 422 also where the hub has no room just then.
        status, _ = await ask("POST", "/runs", body, may=(201, 422), headers=key)
        sure = status == 201
        await ask("POST", "/runs", body, may=(201,) if sure else (201, 409, 422), headers=key)
        other = {**body, "seed": body["seed"] + 1}
        may = (422,) if sure else (201, 409, 422)
        status, _ = await ask("POST", "/runs", other, may=may, headers=key)
        self.visitors.counts["another request under a key refused"] += sure and status == 422

    async def lacks_room(self) -> None:
        """A run that the hub has no room for, unless something made room meanwhile."""
        async with self.beginning("large") as body:
            if body is None:
                return
            status, said = await self.visitors.ask("POST", "/runs", body, may=(201, 422))
        if status == 422 and "no room" not in f"{said}":
            self.visitors.broken(f"a run without room is refused with {said}")
        self.visitors.counts["submitted without room"] += status == 422

    async def talks_nonsense(self) -> None:
        """Where nothing is, by methods that nobody has, with bodies that nobody reads."""
        ask = self.visitors.ask
        await ask("GET", "/nowhere", may=(404,))
        await ask("PUT", "/runs", {}, may=(405,))
        await ask("POST", "/runs", {"name": "x" * TOO_LARGE}, may=(413,))
        await ask("POST", "/runs", {}, may=(413,), headers={"Content-Length": "many"})

    async def harms_twice(self) -> None:
        """A fault under one key is one fault."""
        learners = self.world.learners
        if not learners:
            return
        target, key = self.rng.choice(learners).name, f"{self.rng.random()}"
        body = {"kind": "slow", "target": target, "duration_s": 3.0, "factor": 2.0}
        names = set()
        for _ in range(3):
            status, said = await self.visitors.ask(
                "POST", "/chaos", body, may=(202, 404, 409), headers={"Idempotency-Key": key}
            )
            if status == 202:
                names.add(said["id"])
            await asyncio.sleep(self.rng.choice([0.0, 15.0]))
        if len(names) > 1:
            self.visitors.broken(f"one fault is confirmed as {sorted(names)}")

    async def keeps_a_copy(self) -> None:
        """Makes a checkpoint and begins a run with it, which stays until the world is healed."""
        ask, run = self.visitors.ask, self.visitors.run
        await ask("POST", f"{run}/checkpoints", may=(202, 404, 409))
        for _ in range(LOOKS):
            _, said = await ask("GET", f"{run}/checkpoints", may=(200, 404))
            found = (said or {}).get("checkpoints", [])
            if found or not self.world.scene.faulty:
                break
            await asyncio.sleep(LOOK_S)
        async with self.beginning("kept") as body:
            if body is not None and found:
                chosen = self.rng.choice(found)
                status = await begun_with(self.visitors, self.rng, chosen, body)
                self.visitors.counts["copies kept"] += status in (201, 202)
