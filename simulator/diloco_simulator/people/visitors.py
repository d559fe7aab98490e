"""Whoever else asks a world's coordinator: people who look, drain, listen, copy and inflict faults.

Their dice are their own, so that what goes wrong otherwise falls as without them. What they are
answered is checked, and what they did is undone when the world is healed.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_coordinator.runs.reasons import cannot_go_on
from diloco_shared.spec.run import RunSpec
from diloco_simulator.people.requests import Requests
from diloco_simulator.people.rest import ADDRESS, NoAnswer, RestCalls
from diloco_simulator.people.sequel import Copies
from diloco_simulator.people.tokens import TokenVisits
from diloco_simulator.people.user import AGAIN, OVER
from diloco_simulator.troubles.inflicting import Inflicting
from diloco_simulator.worlds.audits import audited

if TYPE_CHECKING:
    from diloco_simulator.worlds.world import World

# How often a world has visitors of a kind.
OFTEN = 0.5
# No run is over within so many steps of its beginning: none is deleted by a mistaken request.
SURE_STEPS = 25
# A stream is listened to for so long, in virtual seconds.
LISTENED_S = (2.0, 40.0)
# Before the same is asked again, in virtual seconds.
AGAIN_S = 1.0
# What one plan is asked for: small, since it is computed.
PLAN = {"params": 1e8, "chips": 8, "tokens": 1e9, "slice_chips": 4}
Reached = tuple[int, Any]


def asked_first(spec: RunSpec) -> RunSpec:
    """A run that begins again only where somebody asks for it."""
    keeping = spec.keeping.model_copy(update={"begin_again": "ask"})
    return spec.model_copy(update={"keeping": keeping})


class Visitors:
    """Of one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.rest = RestCalls(world.coordinator)
        self.run = f"/runs/{world.spec.name}"
        self.rng = Random(f"visitors {world.seed}")
        self.counts = world.found.counts
        self.drained: set[str] = set()
        self.forgotten: set[str] = set()
        self.copies = Copies(self)
        self.inflicting = Inflicting(self)
        self.requests = Requests(self)
        self.tokens = TokenVisits(self)
        self.tasks: set[asyncio.Task[None]] = set()

    def plan(self) -> None:
        """Draw who comes when."""
        kinds: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (
            self.looks,
            self.asks_wrongly,
            self.drains,
            self.tokens.makes_and_revokes,
            self.listens,
            self.asks_for_a_plan,
            self.forgets,
            self.wants_to_begin_again,
            self.copies.make,
            self.inflicting.inflict,
        )
        for kind in kinds:
            if self.rng.random() < OFTEN:
                for _ in range(self.rng.choice([1, 1, 2])):
                    at = self.rng.uniform(3.0, self.world.options.safety_s)
                    self.world.loop.call_later(at, self._come, kind)
        self.requests.plan()
        self.tokens.plan()

    def _come(self, kind: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.counts[f"visitors: {kind.__name__}"] += 1
        self.begin(kind())

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Something that nobody waits for before the world is over."""
        task = self.world.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.broken(f"a visitor falls over: {task.exception()!r}")

    def heal(self) -> None:
        """What was done is undone."""
        self.begin(self._undrain())
        self.begin(self.copies.remove())
        self.begin(self.requests.remove())

    async def gone(self) -> None:
        """Once nobody is left; the last one audits what the run has left."""
        while self.tasks:
            await asyncio.wait(self.tasks)
        status, said = await self.until("GET", self.run, may=(200, 404))
        if status == 200 and said["state"] in OVER:
            await audited(self.world, RunSpec.model_validate(said["spec"]))

    # --- asking --------------------------------------------------------------------------------

    def broken(self, text: str) -> None:
        self.world.broken("visitors", text)

    async def ask(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        may: tuple[int, ...] = (200,),
        headers: dict[str, str] | None = None,
    ) -> Reached:
        """(0, None) where nobody answers, and 503 where the bus is away: any other answer than
        these, and those that it `may` be, breaks a promise."""
        try:
            status, said = await self.rest.ask(method, path, body, headers)
        except NoAnswer:
            return 0, None
        # While the hub has no room for more streams, no other run has what it needs; the answer
        # may come when there is room again.
        no_room = status == 422 and self.world.case.hardships and "no room" in f"{said}"
        if status not in (*may, 503) and not no_room:
            self.broken(f"{method} {path} is answered with {status}: {said}")
        return status, said

    async def until(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, may: tuple[int, ...]
    ) -> Reached:
        """Again and again, until somebody answers."""
        while True:
            status, said = await self.ask(method, path, body, may=may)
            if status not in AGAIN:
                return status, said
            await asyncio.sleep(AGAIN_S)

    # --- those who look ------------------------------------------------------------------------

    async def looks(self) -> None:
        """At all that there is to see."""
        run = self.run
        for path in ("/runs", "/runs?brief=true&limit=1", "/chaos", "/checkpoints", "/access"):
            await self.ask("GET", path)
        for path in (run, f"{run}/metrics", f"{run}/recoveries", f"{run}/checkpoints"):
            await self.ask("GET", path, may=(200, 404))
        for path in ("/healthz", "/readyz", "/metrics"):
            await self.ask("GET", f"{ADDRESS}{path}")
        await self._members()
        await self._events()
        await self._rounds()
        _, said = await self.ask("GET", f"{run}/checkpoints", may=(200, 404))
        for found in (said or {}).get("checkpoints", ()):
            await self.ask("GET", f"{run}/checkpoints/{found['number']}", may=(200, 404))

    async def _members(self) -> None:
        status, said = await self.ask("GET", "/members")
        for member in said["members"] if status == 200 else ():
            await self.ask("GET", f"/members/{member['id']}", may=(200, 404))

    async def _events(self) -> None:
        after = 0
        while True:
            status, said = await self.ask("GET", f"/events?after={after}&limit=20")
            if status != 200 or not said["events"]:
                return
            seqs = [e["seq"] for e in said["events"]]
            self._ordered("events", seqs, 0 if said["again"] else after)
            after = said["next"]

    async def _rounds(self) -> None:
        """Page by page; a tape that lost records has fewer than before, never others."""
        after: int | None = 0
        while after is not None:
            path = f"{self.run}/rounds?after={after}&limit=5"
            status, said = await self.ask("GET", path, may=(200, 404))
            if status != 200:
                return
            self._ordered("rounds", [r["seq"] for r in said["rounds"]], after)
            after = said["next"]

    def _ordered(self, what: str, seqs: list[int], after: int) -> None:
        if any(b <= a for a, b in zip([after, *seqs], seqs, strict=False)):
            self.broken(f"{what} after {after} are shown as {seqs}")

    async def listens(self) -> None:
        """To all events, or to the run as it changes."""
        path, query = self.rng.choice(
            [("/events/stream", ""), ("/events/stream", "after=3"), (f"{self.run}/stream", "")]
        )
        try:
            heard = await self.rest.listen(path, query, self.rng.uniform(*LISTENED_S))
        except NoAnswer:
            return
        status, said = heard
        if status not in (0, 200, 404):
            self.broken(f"{path} is answered with {status}")
        if status != 200:
            return
        pieces = [line for line in said.splitlines() if line]
        for piece in pieces:
            if piece.startswith("data: "):
                json.loads(piece.removeprefix("data: "))
        seqs = [int(p.removeprefix("id: ")) for p in pieces if p.startswith("id: ")]
        # Whoever asks for what comes after an end that there is not is told from the beginning.
        beyond = min(seqs[:1], default=4) <= 3
        self._ordered(f"pieces of {path}", seqs, 3 if query and not beyond else 0)

    async def asks_for_a_plan(self) -> None:
        await self.ask("GET", "/plan")
        await self.ask("POST", "/plan", dict(PLAN), may=(200, 422))

    # --- those who ask for what cannot be ------------------------------------------------------

    async def asks_wrongly(self) -> None:
        """For what is not there, or not so: a client's error, with a reason."""
        run, spec = self.run, self.world.spec.model_dump(mode="json", exclude={"id"})
        wrong: tuple[tuple[str, str, dict[str, Any] | None, tuple[int, ...]], ...] = (
            ("GET", "/runs/nobody", None, (404,)),
            ("GET", "/members/nobody", None, (404,)),
            ("POST", "/runs", {"name": "half", "algorithm": {"fragments": 0}}, (422,)),
            ("POST", "/runs", {**spec, "name": spec["name"]}, (201, 409)),
            ("PATCH", run, {"quorum": 1000}, (404, 409, 422)),
            ("PATCH", run, {"quorum": "all"}, (422,)),
            ("DELETE", "/tokens/nobody", None, (404,)),
            (
                "DELETE",
                "/members/coordinator",
                None,
                (204, 404, 409),
            ),  # its own key may have run out
            ("POST", "/members/coordinator/drain", None, (404, 409)),
            ("GET", f"{run}/checkpoints/4711", None, (404,)),
            ("DELETE", f"{run}/checkpoints/4711", None, (404,)),
            ("POST", "/checkpoints/submit?checkpoint=none/1", {**spec, "name": "late"}, (404, 422)),
            ("DELETE", "/checkpoints/none/1", None, (404,)),
            ("POST", "/chaos", {"kind": "kill", "target": "nobody"}, (404,)),
        )
        for method, path, body, may in wrong:
            if not self.world.scene.faulty:
                return  # a run that is over could be submitted once more
            await self.ask(method, path, body, may=may)
        stale = {"If-Match": '"0"'}
        await self.ask("POST", f"{run}/resume", may=(404, 409, 412), headers=stale)
        bad = {"Authorization": "Bearer of nobody"}
        await self.ask("GET", run, may=(401,), headers=bad)
        o = self.world.options
        if self.world.loop.now < SURE_STEPS * o.step_s and not (o.stop or o.stop_late):
            await self.ask("DELETE", run, may=(404, 409))

    async def begin_again(self, view: dict[str, Any]) -> None:
        """Where no syncer has the state, and the run waits to be asked."""
        if self.world.spec.keeping.begin_again == "ask" and cannot_go_on(view["syncers"]):
            self.counts["begun again on request"] += 1
            await self.wants_to_begin_again()

    async def wants_to_begin_again(self) -> None:
        """Though somebody has the state, mostly."""
        await self.ask("POST", f"{self.run}/begin-again", may=(202, 404, 409))

    # --- those who change something ------------------------------------------------------------

    async def drains(self) -> None:
        """A member for a while; what it works for now goes on without it, or waits."""
        machines = [*self.world.syncers, *self.world.learners]
        if not machines:
            return
        name = self.rng.choice(machines).name
        if name in self.drained:
            return  # by another one, who undoes it
        self.drained.add(name)
        self.forgotten.discard(name)
        status, said = await self.ask("POST", f"/members/{name}/drain", may=(200, 404))
        lasting = self.world.scene.faulty and name not in self.forgotten
        if status == 200 and lasting and not said["draining"]:
            self.broken(f"{name} is drained, and shown as if it were not")
        await asyncio.sleep(self.rng.uniform(1.0, 20.0))
        status, _ = await self.ask("DELETE", f"/members/{name}/drain", may=(200, 404))
        if status in AGAIN and not self.world.scene.faulty:  # nobody else undoes it any more
            status, _ = await self.until("DELETE", f"/members/{name}/drain", may=(200, 404))
        if status not in AGAIN:
            self.drained.discard(name)

    async def _undrain(self) -> None:
        for name in sorted(self.drained):
            await self.until("DELETE", f"/members/{name}/drain", may=(200, 404))

    async def forgets(self) -> None:
        """Somebody who is gone; who lives is not forgotten."""
        status, said = await self.ask("GET", "/members")
        members = said["members"] if status == 200 else ()
        gone = [m["id"] for m in members if not m["alive"]]
        for name in gone[:1] or [m["id"] for m in members[:1]]:
            self.forgotten.add(name)  # and with it that it was drained
            await self.ask("DELETE", f"/members/{name}", may=(204, 404, 409))
