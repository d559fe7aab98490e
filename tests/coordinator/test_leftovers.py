"""Streams that are made again while their run is deleted go; nobody else's do."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_coordinator.runs import ending_io as leftovers
from diloco_coordinator.runs.ending_io import Leftovers, keep_removed
from diloco_shared import ambient
from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Deleted
from diloco_shared.protocol.wire import encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus

pytestmark = pytest.mark.virtual


class World:
    """A coordinator that knows one run."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker(), "c")
        self.told: list[str] = []
        runs = {"r": "id"}
        self.registry: Any = SimpleNamespace(
            bus=self.bus,
            runs=runs,
            tell=self._tell,
            is_run=lambda run, run_id: runs.get(run) == run_id,
        )
        self.leftovers = Leftovers(self.registry)

    async def _tell(self, run: str, kind: str, text: str, data: dict[str, Any]) -> None:
        self.told.append(data["stream"])

    async def begin(self, *, deleted: bool = True) -> None:
        """The run is seen, and goes; a syncer makes UP anew."""
        for bucket in (subjects.RUNS, subjects.DELETED, *leftovers.OF_RUNS):
            await self.bus.ensure_bucket(bucket)
        # An earlier run of this name was deleted long ago.
        long_ago = ambient.wall() - 2 * leftovers.WATCHED_S
        await self.bus.kv_put(subjects.DELETED, "other", encode(Deleted(run="r", at=long_ago)))
        await self.leftovers.look()
        if deleted:
            await self.bus.kv_put(subjects.DELETED, "id", encode(Deleted(run="r", at=1.0)))
        self.registry.runs.pop("r")
        await self.make()

    async def make(self) -> None:
        await self.bus.ensure_stream(StreamSpec(subjects.up_stream("r"), ("up.r.>",), 1 << 20))

    @property
    def there(self) -> bool:
        return bool(self.bus.broker.exists(subjects.up_stream("r")))


def watched(looking: Leftovers) -> set[tuple[str, str]]:
    """Runs and ids that are looked after now."""
    return {place for place, end in looking.until.items() if ambient.monotonic() < end}


async def test_what_is_made_again_goes_however_late() -> None:
    world = World()
    await world.begin()
    await world.leftovers.look()
    assert not world.there and world.told == [subjects.up_stream("r")]
    await asyncio.sleep(leftovers.WATCHED_S - 150.0)
    await world.make()
    await world.leftovers.look()
    assert not world.there


@pytest.mark.parametrize("bucket", leftovers.OF_RUNS)
async def test_a_key_that_is_written_again_goes(bucket: str) -> None:
    """A learner that heard late of its assignment begins a life of a run that has gone."""
    world = World()
    await world.begin()
    for key in ("r.learner-0", "other.learner-0"):
        await world.bus.kv_put(bucket, key, b"life")
    await world.leftovers.look()
    assert list(await world.bus.kv_all(bucket)) == ["other.learner-0"]


async def test_a_key_of_another_run_of_the_name_stays() -> None:
    world = World()
    await world.begin()
    await world.bus.delete_stream(subjects.up_stream("r"))
    await world.bus.kv_put(subjects.RUNS, "r", b"record")  # and has yet to be heard of
    await world.bus.kv_put(subjects.INCARNATIONS, "r.learner-0", b"life")
    await world.leftovers.look()
    assert list(await world.bus.kv_all(subjects.INCARNATIONS)) == ["r.learner-0"]


async def test_a_run_that_nobody_deleted_keeps_what_it_has() -> None:
    """The hub may have lost its record."""
    world = World()
    await world.begin(deleted=False)
    await world.leftovers.look()
    assert world.there


@pytest.mark.parametrize("mirrored", [True, False])
async def test_another_run_of_the_name_keeps_its_streams(mirrored: bool) -> None:
    world = World()
    await world.begin()
    if mirrored:
        world.registry.runs["r"] = "new"
    else:  # and has yet to be heard of
        await world.bus.kv_put(subjects.RUNS, "r", b"record")
    await world.leftovers.look()
    assert world.there


async def test_a_coordinator_that_begins_anew_knows_what_was_deleted_just_before() -> None:
    """By its life before, say."""
    world = World()
    await world.begin(deleted=False)
    for run_id, value in (
        ("id", encode(Deleted(run="r", at=ambient.wall() - leftovers.WATCHED_S / 2))),
        ("strange", b"no mark"),
        ("ahead", encode(Deleted(run="s", at=ambient.wall() + 9 * leftovers.WATCHED_S))),
    ):
        await world.bus.kv_put(subjects.DELETED, run_id, value)
    again = Leftovers(world.registry)
    await again.look()
    assert not world.there and watched(again) == {("r", "id"), ("s", "ahead")}
    assert max(again.until.values()) <= ambient.monotonic() + leftovers.WATCHED_S
    await asyncio.sleep(leftovers.WATCHED_S / 2)
    await again.look()
    assert watched(again) == {("s", "ahead")}


async def test_what_was_deleted_long_ago_is_not_looked_for_again() -> None:
    world = World()
    await world.begin(deleted=False)
    at = ambient.wall() - leftovers.WATCHED_S - 1.0
    await world.bus.kv_put(subjects.DELETED, "id", encode(Deleted(run="r", at=at)))
    again = Leftovers(world.registry)
    await again.look()
    assert world.there and not watched(again)


async def test_a_first_look_that_fails_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await world.begin(deleted=False)
    mark = encode(Deleted(run="r", at=ambient.wall()))
    await world.bus.kv_put(subjects.DELETED, "id", mark)
    again = Leftovers(world.registry)

    async def away(*what: Any) -> dict[str, Any]:
        raise Unavailable("the bus is away")

    with monkeypatch.context() as patched:
        patched.setattr(world.bus, "kv_all", away)
        with pytest.raises(Unavailable):
            await again.look()
    await again.look()
    assert not world.there


async def test_a_run_that_comes_and_goes_between_two_looks_is_looked_after() -> None:
    world = World()
    world.registry.runs.pop("r")
    for bucket in (subjects.RUNS, subjects.DELETED, *leftovers.OF_RUNS):
        await world.bus.ensure_bucket(bucket)
    await world.leftovers.look()
    await world.bus.kv_put(subjects.DELETED, "id", encode(Deleted(run="r", at=ambient.wall())))
    await world.make()
    await world.leftovers.look()
    assert not world.there


async def test_a_deletion_that_takes_long_is_watched_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leftovers, "WATCHED_S", 30.0)
    world = World()
    for bucket in (subjects.RUNS, subjects.DELETED, *leftovers.OF_RUNS):
        await world.bus.ensure_bucket(bucket)
    await world.leftovers.look()
    await world.bus.kv_put(subjects.DELETED, "id", encode(Deleted(run="r", at=ambient.wall())))
    await world.leftovers.look()
    await asyncio.sleep(leftovers.WATCHED_S)
    world.registry.runs.pop("r")
    await world.make()
    await world.leftovers.look()
    assert not world.there


async def test_it_looks_by_itself() -> None:
    world = World()
    await world.bus.ensure_bucket(subjects.DELETED)
    looking = asyncio.create_task(keep_removed(world.registry))
    await asyncio.sleep(1.0)
    await world.begin()
    await asyncio.sleep(2 * leftovers.LEFTOVERS_LOOK_S)
    assert not world.there
    looking.cancel()
