"""A leader that was cut off while it goes back to a checkpoint: it replaces nothing that its
successor has written, and finishes what it began if nobody else has led."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from syncer.contexts import alone, context
from syncer.test_one_store import SPEC, history, store

from diloco_shared.bus.run_streams import ensure_buckets
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import Place, ShardLease
from diloco_shared.protocol.wire import decode, encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.history.follow_io import Recovered
from diloco_syncer.history.ledger import Ledger
from diloco_syncer.history.tape_io import Deposed, Tape
from diloco_syncer.leadership.leader_io import Leader
from diloco_syncer.leadership.lease import Role
from diloco_syncer.leadership.lease_io import LeaseKeeper
from diloco_syncer.messages.merged_positions_io import MergedPositions

pytestmark = pytest.mark.virtual

# Long enough that whoever waits for nothing but a pause has gone on.
LONG_S = 60.0


class Link(MemoryBus):
    """Something happens before the next write of a bucket gets through."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def append(self, *given: Any, **more: Any) -> int:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        return await super().append(*given, **more)


class CutOff:
    """Two syncers of a run: the first leads, and has merged data shard 1 up to sequence 8."""

    def __init__(self, folder: Path) -> None:
        broker = MemoryBroker()
        self.bus, self.other = Link(broker, "s1"), MemoryBus(broker, "s2")
        self.keeper = LeaseKeeper(self.bus, "r", "s1", "boot", "lock", 3.0)
        self.keeper.lease.role, self.keeper.lease.until = Role.LEADING, math.inf
        self.leader = Leader(
            context(SPEC, self.bus, "s1", folder=folder, checkpoint_root=str(folder)),
            Tape(self.bus, "r"),
            self.keeper,
            Recovered(history(), store(), (0, 0), []),
            lambda seq: None,
        )
        self.ledger = Ledger.empty(1, shards=8)
        self.leader.machine.history.ledger = self.ledger
        self.ledger.places[1] = (0, 8)

    async def begins(self) -> None:
        await ensure_buckets(self.bus)
        await self.leader.merged_positions.write()
        await self.leased(self.bus, 8)

    def lapses(self) -> None:
        self.keeper.lease.until = -math.inf

    def comes_back(self) -> None:
        self.keeper.lease.until = math.inf
        self.keeper.moved.set()

    def is_deposed(self) -> None:
        self.keeper.lease.role = Role.STANDBY
        self.keeper.moved.set()

    async def leased(self, bus: MemoryBus, sequences: int) -> None:
        lease = ShardLease(shard=1, holder="a", incarnation=0, sequences=sequences, passes=0)
        await bus.kv_put(subjects.SHARDS, "r.1", encode(lease))

    async def led_by_another(self) -> None:
        """The link is cut until after the lease, and the second one merges on meanwhile."""
        self.lapses()
        ledger = Ledger.empty(1, shards=8)
        ledger.places[1] = (0, 20)
        await MergedPositions(self.other, "r", lambda: ledger, alone).write()
        await self.leased(self.other, 20)

    async def there(self) -> tuple[int, int]:
        """Sequences of data shard 1: merged as it is told, and read as it is leased."""
        place = await self.other.kv_get(subjects.PLACES, "r.1.0")
        lease = await self.other.kv_get(subjects.SHARDS, "r.1")
        assert place is not None and lease is not None
        return (
            decode(place.value or b"", Place).sequences,
            decode(lease.value or b"", ShardLease).sequences,
        )


AT_CHECKPOINT = (ShardLease(shard=1, holder="", incarnation=-1, sequences=4, passes=0),)


@pytest.fixture
def cut_off(tmp_path: Path) -> CutOff:
    return CutOff(tmp_path)


@pytest.mark.parametrize("when", ["before", "while it writes places", "while it sets leases back"])
async def test_what_its_successor_wrote_stays_after_a_restore(cut_off: CutOff, when: str) -> None:
    """The restore is on the tape, and its leader is about to set places and leases back."""
    await cut_off.begins()
    if when != "while it sets leases back":
        cut_off.ledger.places[1] = (0, 4)
    if when == "before":
        await cut_off.led_by_another()
    else:
        cut_off.bus.meanwhile = cut_off.led_by_another
    going_back = asyncio.create_task(cut_off.leader._gone_back(AT_CHECKPOINT))
    await asyncio.sleep(LONG_S)
    assert await cut_off.there() == (20, 20) and not going_back.done()
    cut_off.is_deposed()
    with pytest.raises(Deposed):
        await going_back
    assert await cut_off.there() == (20, 20)


@pytest.mark.parametrize("deposed", [False, True])
async def test_no_restore_is_recorded_without_its_places(
    cut_off: CutOff, monkeypatch: pytest.MonkeyPatch, *, deposed: bool
) -> None:
    """Nothing else of it begins while another may lead; whoever leads alone goes on from there."""
    await cut_off.begins()
    done = list[Any]()

    async def rewind(serial: int) -> None:
        done.append((await cut_off.there())[0])

    monkeypatch.setattr(cut_off.leader.checkpointer, "merged", lambda _: {1: (0, 4)})
    monkeypatch.setattr(cut_off.leader.checkpointer, "rewind", rewind)
    cut_off.lapses()
    going_back = asyncio.create_task(cut_off.leader._goes_back(1))
    await asyncio.sleep(LONG_S)
    assert not done and await cut_off.there() == (8, 8)
    if deposed:
        cut_off.is_deposed()
        with pytest.raises(Deposed):
            await going_back
        assert not done and await cut_off.there() == (8, 8)
    else:
        cut_off.comes_back()
        await going_back
        assert done == [4]


async def test_one_that_leads_alone_sets_back_what_it_began_to(cut_off: CutOff) -> None:
    """A learner has renewed its lease meanwhile, too."""
    await cut_off.begins()

    async def away() -> None:
        cut_off.lapses()
        await cut_off.leased(cut_off.other, 12)

    cut_off.ledger.places[1] = (0, 4)
    cut_off.bus.meanwhile = away
    going_back = asyncio.create_task(cut_off.leader._gone_back(AT_CHECKPOINT))
    await asyncio.sleep(LONG_S)
    assert not going_back.done()
    cut_off.comes_back()
    await going_back
    assert await cut_off.there() == (4, 4)


async def test_a_lease_that_a_learner_renews_is_set_back_all_the_same(cut_off: CutOff) -> None:
    """Between the look at all leases and the write of this one."""
    await cut_off.begins()
    cut_off.bus.meanwhile = lambda: cut_off.leased(cut_off.other, 12)
    await cut_off.leader.checkpointer.lease_from(AT_CHECKPOINT)
    assert (await cut_off.there())[1] == 4


async def test_places_of_its_beginning_replace_none_of_its_successor(cut_off: CutOff) -> None:
    """It was cut off before it had said a word; nobody watches its lease by then."""
    await cut_off.begins()
    await cut_off.led_by_another()
    cut_off.leader.merged_positions.known = False
    beginning = asyncio.create_task(cut_off.leader.run())
    await asyncio.sleep(LONG_S)
    cut_off.is_deposed()
    with pytest.raises(Deposed):
        await beginning
    assert await cut_off.there() == (20, 20)
