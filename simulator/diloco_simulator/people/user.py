"""The user of a whole world: asks by REST, asks again when nobody answers, and keeps account.

What was accepted must be so some time later, unless the same was asked for differently since; and
what is refused must be refused with a reason (a client's error), never by falling over.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from diloco_shared import ambient
from diloco_shared.protocol.checkpoints import parse_reference
from diloco_shared.spec.run import RunSpec
from diloco_simulator.people.orders import (
    Asked,
    Checkpoint,
    Order,
    Restore,
    RunSetting,
    Tapes,
    View,
)
from diloco_simulator.people.rest import NoAnswer, RestCalls

# Before the same is asked again, in virtual seconds.
AGAIN_S = 1.0
# Within this time what was accepted is so, once every shard has a leader: a record of the tape; a
# checkpoint waits for a disk, and for learners one of which may stay silent. A stop needs none.
WITHIN_S = {"desired": 30.0, "quorum": 30.0, "checkpoint": 700.0, "restore": 180.0}
STOPPED_S = 60.0
# Whoever wants to go back waits so long for a checkpoint that is complete, in virtual seconds: most
# are within a third of that.
WAITS_S = 30.0
# And its mark is on the tape, where nothing else comes first.
MARKED_S = 30.0
STOP = "stop"
# Kinds of orders that a record of its own fulfils.
SETTINGS = ("desired", "quorum")
OVER = ("finished", "stopped")
# No answer, or not now: the bus is away.
AGAIN = (0, 503)

# Of a run for which the hub has no room now.
NO_ROOM = "the message server has no room for them"


class User:
    """Of one run."""

    def __init__(
        self,
        rest: RestCalls,
        spec: RunSpec,
        rng: Random,
        counts: Counter[str],
        report: Callable[[str, str], None],
        tapes: Tapes,
    ) -> None:
        self.rest = rest
        self.tapes = tapes
        self.spec = spec
        self.run = f"/runs/{spec.name}"
        self.rng = rng
        self.counts = counts
        self.report = report
        self.orders: dict[str, Asked] = {}  # the newest of each kind
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

    async def _order(
        self,
        kind: str,
        method: str,
        path: str,
        body: View | None,
        order: Callable[[View], Order],
    ) -> int:
        """Once; what it is answered with. `order` is made of that."""
        since, sent_at = self.tapes.counts(), self.tapes.now
        status, said = await self._ask(method, path, body)
        if 200 <= status < 300:
            self.orders[kind] = Asked(order(said), ambient.monotonic(), since, sent_at)
            self.counts[f"{kind} accepted"] += 1
        elif status:
            self.counts[f"{kind} refused with {status}"] += 1
        else:
            self.orders.pop(kind, None)  # what is in force now, nobody knows
        return status

    async def desire(self, verb: str) -> int:
        """`pause`, `resume` or `stop`."""
        orders = {
            "pause": RunSetting(verb, "paused", 1, 0, lambda view: view["state"] == "paused"),
            "resume": RunSetting(verb, "paused", 0, 0, lambda view: view["state"] != "paused"),
            STOP: RunSetting(STOP, "stopping", 1, 0, lambda view: view["state"] in OVER),
        }
        return await self._order(
            "desired", "POST", f"{self.run}/{verb}", None, lambda _: orders[verb]
        )

    async def quorum(self, quorum: int) -> int:
        """Another K."""
        order = RunSetting(
            f"quorum {quorum}",
            "quorum",
            quorum,
            self.spec.algorithm.quorum,
            lambda view: view["status"]["quorum"] == quorum,
        )
        return await self._order("quorum", "PATCH", self.run, {"quorum": quorum}, lambda _: order)

    async def wish(self) -> None:
        """Pause or go on, and another quorum."""
        await self.desire(self.rng.choice(["pause", "resume"]))
        await self.quorum(self.rng.randint(1, self.spec.membership.learners_min))

    async def checkpoint(self) -> int:
        """Ask for one; a refusal says that there is nothing to keep yet, or that one is made."""
        return await self._order(
            "checkpoint",
            "POST",
            f"{self.run}/checkpoints",
            None,
            lambda said: Checkpoint(said["number"]),
        )

    def expects(self, number: int) -> None:
        """Somebody's checkpoint, unless one of the user's own is awaited."""
        if number and "checkpoint" not in self.orders:
            asked = Asked(Checkpoint(number), ambient.monotonic(), self.tapes.counts())
            self.orders["checkpoint"] = asked

    async def restore(self, waits_s: float = WAITS_S) -> int:
        """Ask for the run to go back to a complete one: what it is answered with. 0: no answer, or
        there is none after so long."""
        until, dice = self.tapes.now + waits_s, self.rng
        while not (there := await self._complete()):
            if self.tapes.now > until:
                return 0
            # Whoever has waited draws with dice of their own: others fall as if nobody had.
            dice = Random(f"restores late of {self.spec.seed}, {self.tapes.now:.3f}")
            await asyncio.sleep(AGAIN_S)
        ref = dice.choice(there)
        number = ref["number"] if "number" in ref else parse_reference(ref["ref"])[2]
        path = f"{self.run}/checkpoints/{number}/restore"
        text = f"back to {number}"
        return await self._order(
            "restore", "POST", path, {}, lambda said: Restore(text, said["serial"])
        )

    async def _complete(self) -> list[View]:
        """Checkpoints of the run that can be gone back to."""
        _, said = await self._ask("GET", f"{self.run}/checkpoints")
        return [c for c in (said or {}).get("checkpoints", []) if c.get("complete", True)]

    async def calm(self, quorum: int) -> None:
        """Once all is well: go on as in the beginning, if it was not stopped."""
        await self.until_answered(lambda: self.desire("resume"))
        await self.until_answered(lambda: self.quorum(quorum))

    async def until_answered(self, ask: Callable[[], Awaitable[int]]) -> int:
        """Again and again; what it is answered with in the end."""
        while True:
            if (status := await ask()) not in AGAIN:
                return status
            await asyncio.sleep(AGAIN_S)

    async def delete(self) -> bool:
        """Once; whether it is gone."""
        status, said = await self._ask("DELETE", self.run)
        if status not in (*AGAIN, 204, 404, 409):
            self.report("REST", f"the run cannot be deleted: {status} {said}")
        return status in (204, 404)

    # --- judging -------------------------------------------------------------------------------

    def unheeded(self, view: View, well_s: float, led_s: float) -> list[str]:
        """Orders that should be in force by now; `well_s`: since when all is well, `led_s`: since
        when every shard is led. Only a stop needs no leader."""
        found, now = [], ambient.monotonic()
        for kind, asked in list(self.orders.items()):
            if kind in SETTINGS and self.tapes.replaced(kind, asked):
                del self.orders[kind]
                continue
            if self.tapes.too_late(asked):
                self.counts["checkpoints that came after the first shard's end"] += 1
                del self.orders[kind]
                continue
            order, over = asked.order, view["state"] in OVER
            if view["status"] is None and not over:
                continue
            so = over or (self.tapes.so(asked) and order.shown(view))
            stops = order.text == STOP
            within_s = STOPPED_S if stops else WITHIN_S[kind]
            late = min(well_s if stops else led_s, now - asked.at) > within_s
            # What needed no record of its own must be so in the end.
            if over or late or (so and self.tapes.done(asked)):
                del self.orders[kind]
                self._judged(late=late, over=over)
                self.counts[f"{kind} in force"] += so and self.tapes.done(asked)
                if not so:
                    found.append(f"{order.text} is accepted, and not so ({view['reason']})")
            elif min(led_s, now - asked.at) > MARKED_S and not self._begins(kind):
                del self.orders[kind]
                found.append(f"{order.text} is accepted, and has not begun ({view['reason']})")
        return found

    def _judged(self, *, late: bool, over: bool) -> None:
        """An order was, in its time or too late; of a run that is over nobody knows any more."""
        if late or not over:
            self.tapes.observer.watch.report.looked("commands")

    def _begins(self, kind: str) -> bool:
        """Whether nothing is to be seen of a checkpoint only because something else comes first."""
        first = kind != "checkpoint" or "restore" in self.orders
        return first or self.tapes.begins(self.orders[kind])

    @property
    def awaits(self) -> bool:
        """Whether a record is still to come of what was ordered of the run as a whole."""
        settings = [asked for kind, asked in self.orders.items() if kind in SETTINGS]
        return not all(self.tapes.so(asked) for asked in settings) or not all(
            self._begins(kind) for kind in self.orders
        )
