"""What an Idempotency-Key stands for: a request that may come again makes its run once.

Which ids such a request has given to its run is noted before any run is made: an answer may be
lost at any moment, and the same request may come twice at once, by two coordinators.
"""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from diloco_coordinator.access import digest
from diloco_coordinator.api.problems_io import Problem
from diloco_coordinator.runs.registry_io import REPEATS, Registry
from diloco_coordinator.runs.statuses import run_id_of
from diloco_shared.bus.port import Conflict
from diloco_shared.bus.repeating import CONFLICTS_MAX, against_others
from diloco_shared.bus.stored_records import write_if
from diloco_shared.protocol import subjects

T = TypeVar("T")

# How long a repeat of a request is known as one.
REPEAT_S = 86_400.0
# Ids that one request may have given to its run: a client repeats it a few times.
IDS_MAX = 8
# Looks at whether the other one of two requests has made the run, and seconds between them: its
# streams are made meanwhile, each within a second or two.
MADE_LOOKS, MADE_LOOK_S = 60, 0.25


def other_request() -> Problem:
    """Of a key that came with something else before."""
    text = "a key stands for one request: make a new one for a new request"
    return Problem(422, "Another request used this Idempotency-Key", text)


async def until_written(run: str, what: Callable[[], Awaitable[T]]) -> T:
    """Try again where another writer came first; 409 where others write without end."""
    try:
        return await against_others(what)
    except Conflict:
        text = f"{CONFLICTS_MAX} attempts lost: others write {run!r} too"
        raise Problem(409, "The run keeps changing", text) from None


class Repeatable:
    """One request, of one key."""

    def __init__(self, registry: Registry, key: str, body: dict[str, Any], run: str) -> None:
        self.registry, self.run = registry, run
        self.place = (REPEATS, digest(key)[:32])
        self.asked = digest(json.dumps(body, sort_keys=True))

    async def came_before(self, run_id: str) -> bool:
        """Whether this very request made its run already; 422 if it was another one, and 409 if
        that run was deleted since: whoever deletes one wants none, and a repeat may come late.

        If not, it may now, as `run_id`. A run of this name that has none of its ids is somebody
        else's.
        """

        async def noted() -> bool:
            revision, ids = await self._noted()
            if ids and await self._is_one_of(ids):
                return True
            # Else known, but without a run: the first attempt died half way, or it is deleted.
            await self._none_deleted(ids)
            await self._note([*ids[1 - IDS_MAX :], run_id], revision)
            return False

        return await until_written(self.run, noted)  # the same request may come twice at once

    async def was_made(self) -> bool:
        """Whether the same request, come at the same time, made the run; waits while it does."""
        for _ in range(MADE_LOOKS):
            _, ids = await self._noted()
            if await self._is_one_of(ids):
                return True
            known = self.registry.runs.get(self.run)
            if known is None or known.phase != "submitting" or run_id_of(known) not in ids:
                return False
            await asyncio.sleep(MADE_LOOK_S)
        return False

    async def forget(self, run_id: str) -> None:
        """An id was given to no run after all, and its removal is no user's: the same request may
        make the run later. Raises BusError."""

        async def forgotten() -> None:
            revision, ids = await self._noted()
            if run_id in ids:
                await self._note([i for i in ids if i != run_id], revision)

        with contextlib.suppress(Conflict):  # the same request comes again and again
            await against_others(forgotten)

    async def _note(self, ids: list[str], revision: int) -> None:
        """Write down the ids; Conflict where the note is not of that revision any more."""
        note = " ".join([self.asked, *ids]).encode()
        await write_if(self.registry.bus, *self.place, note, revision, ttl_s=REPEAT_S)

    async def _none_deleted(self, ids: list[str]) -> None:
        """409 where one of the runs that had these ids was deleted. Its mark is kept for longer
        than the note of its request."""
        for run_id in ids:
            mark = await self.registry.bus.kv_get(subjects.DELETED, run_id)
            if mark is not None and mark.value:
                text = f"this request made {self.run!r}, and that run was deleted: use a new key"
                raise Problem(409, "The run was deleted", text)

    async def _noted(self) -> tuple[int, list[str]]:
        """Revision of the note, 0 for none, and the ids in it."""
        entry = await self.registry.bus.kv_get(*self.place)
        if entry is None or not entry.value:
            return 0, []
        before, *ids = entry.value.decode().split()
        if before != self.asked:
            raise other_request()
        return entry.revision, ids

    async def _is_one_of(self, ids: list[str]) -> bool:
        """Whether a run is there that has one of these ids, perhaps by another coordinator."""
        r, run = self.registry, self.run
        return await r.look_for_run(run) and r.there(run) and run_id_of(r.runs[run]) in ids
