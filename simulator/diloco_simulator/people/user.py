"""The user of a whole world: asks by REST, asks again when nobody answers, and keeps account.

What was accepted must be so some time later, unless the same was asked for differently since; and
what is refused must be refused with a reason (a client's error), never by falling over.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from diloco_shared import ambient
from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.spec.run import RunSpec
from diloco_simulator.people.rest import NoAnswer, RestCalls

# Before the same is asked again, in virtual seconds.
AGAIN_S = 1.0
# Within this time, where a step takes a second, what was accepted is so once all is well: a record
# of the tape; a checkpoint waits for a disk, and for learners one of which may stay silent.
WITHIN_S = {"desired": 60.0, "quorum": 60.0, "checkpoint": 700.0, "restore": 700.0}
OVER = ("finished", "stopped")
# No answer, or not now: the bus is away.
AGAIN = (0, 503)

View = dict[str, Any]

# Of a run for which the hub has no room now.
NO_ROOM = "the message server has no room for them"


@dataclass(frozen=True, slots=True)
class Order:
    """What was accepted, and whether a view shows that it is so."""

    text: str
    shown: Callable[[View], bool]


class User:
    """Of one run."""

    def __init__(
        self,
        rest: RestCalls,
        spec: RunSpec,
        rng: Random,
        counts: Counter[str],
        report: Callable[[str, str], None],
    ) -> None:
        self.rest = rest
        self.spec = spec
        self.run = f"/runs/{spec.name}"
        self.rng = rng
        self.counts = counts
        self.report = report
        # The newest of each kind, and when it was accepted.
        self.orders: dict[str, tuple[Order, float]] = {}
        self.begun = False

    # --- asking --------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, body: View | None = None) -> tuple[int, Any]:
        """(0, None) where nobody answers; a fault of the coordinator's own is a violation."""
        try:
            status, said = await self.rest.ask(method, path, body)
        except NoAnswer:
            self.counts["requests without an answer"] += 1
            return 0, None
        if status == 500:
            self.report("REST", f"{method} {path} fell over: {said}")
        return status, said

    async def begin(self, path: str = "/runs") -> None:
        """Submit the run, until it is there; only the answer may have been lost."""
        body = self.spec.model_dump(mode="json", exclude={"id"})
        while not self.begun:
            status, said = await self._ask("POST", path, body)
            full = status == 422 and NO_ROOM in str(said)
            if status in (404, 422) and not full:
                self.report("REST", f"the run is refused: {said}")
                return
            self.counts["a later run without room"] += full
            self.begun = status in (201, 409)
            if not self.begun:
                await asyncio.sleep(AGAIN_S)

    async def view(self) -> View | None:
        """The run as it is shown; None: nobody answers."""
        status, said = await self._ask("GET", self.run)
        return said if status == 200 else None

    async def _order(self, kind: str, order: Order, method: str, path: str, body: Any) -> int:
        """Once; what it is answered with."""
        status, _ = await self._ask(method, path, body)
        if 200 <= status < 300:
            self.orders[kind] = order, ambient.monotonic()
            self.counts[f"{kind} accepted"] += 1
        elif status:
            self.counts[f"{kind} refused with {status}"] += 1
        else:
            self.orders.pop(kind, None)  # what is in force now, nobody knows
        return status

    async def desire(self, verb: str) -> int:
        """`pause`, `resume` or `stop`."""
        shown: dict[str, Callable[[View], bool]] = {
            "pause": lambda view: view["state"] == "paused",
            "resume": lambda view: view["state"] != "paused",
            "stop": lambda view: view["state"] in OVER,
        }
        return await self._order(
            "desired", Order(verb, shown[verb]), "POST", f"{self.run}/{verb}", None
        )

    async def quorum(self, quorum: int) -> int:
        order = Order(f"quorum {quorum}", lambda view: view["status"]["quorum"] == quorum)
        return await self._order("quorum", order, "PATCH", self.run, {"quorum": quorum})

    async def wish(self) -> None:
        """Pause or go on, and another quorum."""
        await self.desire(self.rng.choice(["pause", "resume"]))
        await self.quorum(self.rng.randint(1, self.spec.membership.learners_min))

    async def checkpoint(self) -> None:
        """Ask for one; a refusal says that there is nothing to keep yet, or that one is made."""
        order = Order("a checkpoint", lambda view: view["status"]["checkpoint_state"] != "making")
        await self._order("checkpoint", order, "POST", f"{self.run}/checkpoints", None)

    async def restore(self) -> None:
        """Ask for the run to go back to a complete one, if there is any."""
        _, said = await self._ask("GET", f"{self.run}/checkpoints")
        there = [c for c in (said or {}).get("checkpoints", []) if c.get("complete", True)]
        if not there:
            return
        ref = self.rng.choice(there)
        number = ref["number"] if "number" in ref else parse_reference(ref["ref"])[2]
        before = await self.view()
        serial = (before or {"status": None})["status"]
        known = serial["restores"] if serial else 0
        order = Order(f"back to {number}", lambda view: view["status"]["restores"] > known)
        await self._order("restore", order, "POST", f"{self.run}/checkpoints/{number}/restore", {})

    async def calm(self, quorum: int) -> None:
        """Once all is well: go on as in the beginning, if it was not stopped."""
        await self._until_answered(lambda: self.desire("resume"))
        await self._until_answered(lambda: self.quorum(quorum))

    async def _until_answered(self, ask: Callable[[], Awaitable[int]]) -> None:
        while True:
            if await ask() not in AGAIN:
                return
            await asyncio.sleep(AGAIN_S)

    async def delete(self) -> bool:
        """Once; whether it is gone."""
        status, said = await self._ask("DELETE", self.run)
        if status not in (*AGAIN, 204, 404, 409):
            self.report("REST", f"the run cannot be deleted: {status} {said}")
        return status in (204, 404)

    # --- judging -------------------------------------------------------------------------------

    def unheeded(self, view: View, well_s: float, led_s: float, step_s: float) -> list[str]:
        """Orders that should be in force by now; `well_s`: since when all is well, `led_s`: since
        when every shard is led. Only a stop needs no leader."""
        found, now = [], ambient.monotonic()
        for kind, (order, at) in list(self.orders.items()):
            if view["status"] is None and view["state"] not in OVER:
                continue
            if view["state"] in OVER or order.shown(view):
                del self.orders[kind]
                self.counts[f"{kind} in force"] += 1
            elif min(well_s if order.text == "stop" else led_s, now - at) > WITHIN_S[kind] * step_s:
                del self.orders[kind]
                found.append(f"{order.text} is accepted, and not so ({view['reason']})")
        return found
