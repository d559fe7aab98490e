"""The run's numbers read back from what is published, when nothing else is left."""

import numpy as np
import pytest
from syncer.test_rebirth import history, init_spec, publication, rebirth, values

from diloco_shared.budget import assumed, limits
from diloco_shared.bus.blobs import put_blob
from diloco_shared.bus.run_streams import ensure_run_streams
from diloco_shared.numerics.arrays import digest_array
from diloco_shared.protocol.messages import PublicationManifest, Restored
from diloco_shared.protocol.wire import encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.merging.published_io import Unpublished, read_newest, read_recorded
from diloco_syncer.merging.store import in_memory

pytestmark = pytest.mark.virtual

Published = tuple[PublicationManifest, bytes]

A_F, B_F, C_F = values(), values(), values()
OTHER_F = np.arange(6, dtype=np.float32)
OTHER = publication(0, OTHER_F, fragment=1)


async def dn(*published: Published) -> MemoryBus:
    """A bus on which these are, chunks and manifests."""
    bus = MemoryBus(MemoryBroker(), "s")
    await ensure_run_streams(bus, "t", limits(assumed(init_spec())))
    for manifest, payload in published:
        await put_blob(bus, manifest.blob.subject, payload)
        await bus.append(f"{manifest.blob.subject}.m", encode(manifest))
    return bus


async def test_the_newest_of_each_fragment_is_read_and_a_newer_epoch_than_all_begins() -> None:
    bus = await dn(publication(1, A_F, epoch=3), publication(2, B_F, A_F, epoch=3), OTHER)
    store, born = await read_newest(history(), bus, "why", in_memory)
    assert (born.epoch, born.versions) == (4, (2, 0)), "fragment 1 is of epoch 0"
    assert np.array_equal(store.fragments[0].anchor, B_F)
    assert np.array_equal(store.fragments[1].anchor, OTHER_F)


async def test_what_a_record_speaks_of_is_read_and_nothing_newer() -> None:
    bus = await dn(publication(0, A_F), publication(1, B_F, A_F), publication(2, C_F, B_F), OTHER)
    record = rebirth((1, 0), anchor_digests=(digest_array(B_F), digest_array(OTHER_F)))
    store = await read_recorded(history(), bus, record, in_memory)
    assert [store.version(p) for p in (0, 1)] == [1, 0]
    assert np.array_equal(store.fragments[0].anchor, B_F)


async def test_a_damaged_one_gives_way_to_the_one_before() -> None:
    damaged = publication(1, B_F)
    bus = await dn(publication(0, A_F), (damaged[0], bytes(len(damaged[1]))), OTHER)
    store, born = await read_newest(history(), bus, "why", in_memory)
    assert born.versions == (0, 0) and np.array_equal(store.fragments[0].anchor, A_F)


RESTORED = Restored(epoch=1, serial=1, source="t/000001")


async def test_of_two_histories_nothing_is_put_together() -> None:
    """The leader died before all of what the run went back to was published."""
    h = history()
    h.epoch, h.restored = 1, RESTORED
    abandoned = publication(5, A_F), publication(5, OTHER_F + 1, fragment=1)
    half = publication(0, OTHER_F, fragment=1, epoch=1)
    with pytest.raises(Unpublished, match="since the run went back to t/000001: it waits for t/"):
        await read_newest(h, await dn(*abandoned, half), "why", in_memory)
    whole = publication(0, B_F, epoch=1)
    store, born = await read_newest(h, await dn(*abandoned, half, whole), "why", in_memory)
    assert born.versions == (0, 0) and np.array_equal(store.fragments[0].anchor, B_F)
    # What the checkpoint holds may still be there as it was published at first.
    h.versions[0], h.anchor_digests[0] = 4, digest_array(C_F)
    store, born = await read_newest(
        h, await dn(*abandoned, publication(4, C_F), half), "why", in_memory
    )
    assert born.versions == (4, 0) and np.array_equal(store.fragments[0].anchor, C_F)


async def test_what_an_older_leader_put_together_is_executed_all_the_same() -> None:
    h = history()
    h.epoch, h.restored = 1, RESTORED
    bus = await dn(publication(5, A_F), publication(0, OTHER_F, fragment=1, epoch=1))
    record = rebirth((5, 0), epoch=2, anchor_digests=(digest_array(A_F), digest_array(OTHER_F)))
    store = await read_recorded(h, bus, record, in_memory)
    assert [store.version(p) for p in (0, 1)] == [5, 0]


async def test_what_cannot_be_read_is_named_with_its_reason() -> None:
    damaged = publication(1, B_F)
    with pytest.raises(Unpublished, match="fragment 0 is damaged"):
        bus = await dn((damaged[0], bytes(len(damaged[1]))), OTHER)
        await read_newest(history(), bus, "why", in_memory)
    with pytest.raises(Unpublished, match="nothing that makes a version of fragment 1"):
        await read_newest(history(), await dn(publication(0, A_F)), "why", in_memory)
