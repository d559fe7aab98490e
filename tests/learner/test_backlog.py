"""Publications that wait: in order, bounded, and none from before the newest keyframe."""

import asyncio

from diloco_learner.exchange.downlink_io import WAITING_MAX, Backlog
from diloco_shared.protocol.messages import Blob, PublicationManifest, Stamp


def publication(version: int, *, epoch: int = 0, keyframe: bool = False) -> PublicationManifest:
    return PublicationManifest(
        run="r",
        epoch=epoch,
        term=1,
        round=version,
        fragment=0,
        version=version,
        prev_version=-1 if keyframe else version - 1,
        codec="fp32",
        values=4,
        anchor_digest="0" * 32,
        config_hash="0" * 32,
        participants=(),
        last_merged={},
        stamp=Stamp(round=version, steps=0, fraction=0.0, fraction_per_step=0.0),
        blob=Blob(subject="dn.r.0.0.0.1", bytes=16, chunk_bytes=16, chunks=1, digest="0" * 32),
    )


async def taken(backlog: Backlog, count: int) -> list[tuple[int, int]]:
    async with asyncio.timeout(30):
        found = [await backlog.get() for _ in range(count)]
    return [(m.epoch, m.version) for m in found]


async def test_they_come_in_order_and_a_keyframe_replaces_those_before_it() -> None:
    backlog = Backlog()
    for version in (3, 4, 5):
        await backlog.put(publication(version))
    assert await taken(backlog, 2) == [(0, 3), (0, 4)]
    await backlog.put(publication(6, keyframe=True))
    await backlog.put(publication(7))
    assert await taken(backlog, 2) == [(0, 6), (0, 7)]


async def test_an_old_keyframe_sent_again_replaces_nothing_newer() -> None:
    backlog = Backlog()
    await backlog.put(publication(2, epoch=1))
    await backlog.put(publication(5, keyframe=True))
    assert await taken(backlog, 2) == [(1, 2), (0, 5)]


async def test_a_full_one_waits_and_a_keyframe_makes_room() -> None:
    backlog = Backlog()
    for version in range(WAITING_MAX):
        await backlog.put(publication(version))
    adding = asyncio.create_task(backlog.put(publication(WAITING_MAX)))
    await asyncio.sleep(0.01)
    assert not adding.done()
    assert await taken(backlog, 1) == [(0, 0)]
    await adding
    await backlog.put(publication(1000, keyframe=True))
    assert await taken(backlog, 1) == [(0, 1000)]
