"""Visitors who give others rights: tokens are made, used, rotated, revoked, and looked up.

A token is good for what it is for from the answer that shows it, and for nothing else; not a moment
longer than until it is revoked or replaced without an overlap; and who did it stands in the audit
log of the process that was asked. The dice are their own.
"""

from collections.abc import Callable, Coroutine
from random import Random
from typing import TYPE_CHECKING, Any

from diloco_coordinator.access import ADMIN, OVERLAP_S_MAX
from diloco_simulator.people.user import AGAIN

if TYPE_CHECKING:
    from diloco_simulator.people.visitors import Visitors

# How often a world has each kind, beside those who make one and revoke it.
OFTEN = 0.4
# What nobody may ask for, and what it is answered with.
WRONG: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    ({"name": ADMIN, "scopes": ["read"]}, (422,)),
    ({"name": "half", "scopes": []}, (422,)),
    ({"name": "half", "scopes": ["read"], "never": True, "expires_in_s": 60.0}, (422,)),
    ({"name": "half", "scopes": ["read"], "expires_at": 1.0}, (422,)),
    ({"name": "half", "scopes": ["administer"], "runs": ["some-*"]}, (422,)),
)


class TokenVisits:
    """Of one world."""

    def __init__(self, visitors: "Visitors") -> None:
        self.visitors = visitors
        self.world = visitors.world
        self.rng = Random(f"tokens {visitors.world.seed}")

    def plan(self) -> None:
        """Draw who comes when."""
        kinds: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (
            self.rotates,
            self.limits,
            self.asks_wrongly,
        )
        for kind in kinds:
            if self.rng.random() < OFTEN:
                at = self.rng.uniform(3.0, self.world.options.safety_s)
                self.world.loop.call_later(at, self._come, kind)

    def _come(self, kind: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.visitors.counts[f"tokens: {kind.__name__}"] += 1
        self.visitors.begin(kind())

    # --- asking --------------------------------------------------------------------------------

    async def _make(self, **of_it: Any) -> tuple[str, dict[str, str]] | None:
        """Its name, and what whoever has it says with a request; None where nobody knows."""
        name = f"of-visitor-{self.rng.randrange(10_000)}"
        body = {"name": name, "scopes": ["read"], **of_it}
        status, said = await self.visitors.ask("POST", "/tokens", body, may=(201, 409))
        return (name, _bearer(said)) if status == 201 else None

    async def _access(self, headers: dict[str, str], *may: int) -> None:
        status, _ = await self.visitors.ask("GET", "/access", may=may, headers=headers)
        self.visitors.counts[f"tokens: answered with {status}"] += 1
        self._looked(status)

    def _looked(self, status: int) -> None:
        """At what a token is good for: where a coordinator answers that has what it needs."""
        self.world.found.looks["tokens"] += status not in AGAIN

    # --- kinds ---------------------------------------------------------------------------------

    async def makes_and_revokes(self) -> None:
        """It works, as what it is for, until it is revoked."""
        if (made := await self._make()) is None:
            return
        name, mine = made
        ask = self.visitors.ask
        await ask("GET", "/tokens")
        await self._access(mine, 200)
        process = self.world.coordinator.process
        status, _ = await ask("POST", f"{self.visitors.run}/pause", may=(403,), headers=mine)
        if status == 403:
            await self._noted(name, process)
        await self.visitors.until("DELETE", f"/tokens/{name}", may=(204, 404))
        await self._access(mine, 401)

    async def _noted(self, name: str, process: Any) -> None:
        """Whoever was refused stands in the log, as long as the same process is asked."""
        status, said = await self.visitors.ask("GET", f"/audit?actor={name}")
        if status == 200 and process is self.world.coordinator.process:
            self._looked(status)
            if not any(row["status"] == 403 for row in said["rows"]):
                self.visitors.broken(f"{name} was refused, and the audit log says {said['rows']}")
            self.visitors.counts["tokens: refusals found in the audit log"] += 1

    async def rotates(self) -> None:
        """The new secret works; the old one does as long as was said, which no clock is off by."""
        if (made := await self._make()) is None:
            return
        name, old = made
        for overlap_s in (OVERLAP_S_MAX, 0.0):
            path, body = f"/tokens/{name}/rotate", {"overlap_s": overlap_s}
            status, said = await self.visitors.ask("POST", path, body, may=(200, 409))
            if status != 200:
                return  # nobody knows which is good
            new = _bearer(said)
            await self._access(new, 200)
            await self._access(old, 200 if overlap_s else 401)
            old = new
        await self.visitors.until("DELETE", f"/tokens/{name}", may=(204, 404))
        await self.visitors.ask("POST", f"/tokens/{name}/rotate", {}, may=(404,))

    async def limits(self) -> None:
        """To runs and members that nobody has: it sees none, and drains nobody."""
        made = await self._make(scopes=["read", "operate"], runs=["some-*"], sites=["some-*"])
        if made is None:
            return
        name, mine = made
        ask, may = self.visitors.ask, (403, 404)
        status, said = await ask("GET", "/runs", headers=mine)
        if status == 200 and said["runs"]:
            self.visitors.broken(f"a token for other runs sees {len(said['runs'])}")
        await ask("GET", self.visitors.run, may=may, headers=mine)
        await ask("POST", f"{self.visitors.run}/pause", may=may, headers=mine)
        await ask("POST", f"/members/{self.world.coordinator.name}/drain", may=may, headers=mine)
        await self.visitors.until("DELETE", f"/tokens/{name}", may=(204, 404))

    async def asks_wrongly(self) -> None:
        """For what cannot be: a reason, and nothing is made."""
        for body, may in WRONG:
            await self.visitors.ask("POST", "/tokens", body, may=may)
        await self.visitors.ask("DELETE", f"/tokens/{ADMIN}", may=(409,))
        await self.visitors.ask("POST", f"/tokens/{ADMIN}/rotate", {}, may=(409,))
        status, said = await self.visitors.ask("GET", "/tokens")
        if status == 200 and any(token["name"] == "half" for token in said["tokens"]):
            self.visitors.broken("a token that was refused is there")


def _bearer(said: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {said['token']}"}
