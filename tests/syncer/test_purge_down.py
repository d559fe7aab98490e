"""What a keyframe replaces on DN goes; nothing of the keyframe itself does, whoever is late."""

from typing import Any

import numpy as np
import pytest
from syncer.contexts import context
from syncer.test_rebirth import init_spec, publication

from diloco_shared.bus.blobs import put_blob
from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_shared.protocol import subjects
from diloco_shared.protocol.wire import encode
from diloco_simulator.hub.broker import MemoryBroker
from diloco_simulator.hub.bus import MemoryBus
from diloco_syncer.events import PurgeDown
from diloco_syncer.messages.outbox_io import Outbox


class Down:
    """DN of run `t`."""

    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryBroker(), "t")
        self.outbox = Outbox(context(init_spec(), self.bus))

    async def prepare(self) -> None:
        captured = ("dn.t.>",)
        down = StreamSpec(subjects.dn_stream("t"), captured, 1 << 20, synced=False)
        await self.bus.ensure_stream(down)

    async def chunks(self, version: int, term: int) -> str:
        subject = subjects.publication("t", 0, 0, version, term)
        await put_blob(self.bus, subject, np.full(8, version, np.float32).tobytes())
        return subject

    async def manifest(self, subject: str, *, whole: bool = True) -> None:
        """Of a keyframe, unless it is not `whole`."""
        _, _, epoch, fragment, version, term = subject.split(".")
        payload = b"m"
        if version.isdecimal():
            values = np.full(8, int(version), np.float32)
            before = None if whole else values - 1
            place = {"epoch": int(epoch), "term": int(term)}
            payload = encode(publication(int(version), values, before, int(fragment), **place)[0])
        await self.bus.append(subject + ".m", payload)

    async def there(self) -> set[str]:
        stored = await self.bus.fetch(subjects.dn_stream("t"), "dn.t.>")
        return {s.subject for s in stored}


async def test_all_before_a_keyframe_goes() -> None:
    down = Down()
    await down.prepare()
    await down.manifest("dn.t.0.0.x.y")  # anybody may write there
    for version in (0, 1):
        await down.manifest(await down.chunks(version, 1))
    keyframe = await down.chunks(2, 1)
    await down.manifest(keyframe)
    await down.outbox.purge_down(PurgeDown(0, 0, 2))
    assert await down.there() == {keyframe, keyframe + ".m"}


async def test_a_late_manifest_of_an_earlier_leader_takes_no_keyframe_with_it() -> None:
    down = Down()
    await down.prepare()
    late = await down.chunks(1, 1)
    keyframe = await down.chunks(2, 2)
    await down.manifest(keyframe)
    await down.manifest(late)  # of a leader that was deposed, and did not know
    await down.outbox.purge_down(PurgeDown(0, 0, 2))
    assert {keyframe, keyframe + ".m"} <= await down.there()
    assert late not in await down.there(), "what came before the keyframe is gone"


async def test_what_goes_is_looked_for_again_after_a_server_was_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It lost its newest, and other publications stand at their sequences."""
    down = Down()
    await down.prepare()
    await down.manifest(await down.chunks(0, 1))
    for version in (1, 2):
        await down.manifest(await down.chunks(version, 1))
    real, away, kept = down.bus.purge, True, ""

    async def purge(stream: str, subject: str, **more: Any) -> int:
        nonlocal away, kept
        if away:
            away = False
            down.bus.broker.lose(stream, 4)
            kept = await down.chunks(2, 2)
            await down.manifest(kept)
            raise Unavailable("away")
        return await real(stream, subject, **more)

    monkeypatch.setattr(down.bus, "purge", purge)
    await down.outbox.purge_down(PurgeDown(0, 0, 2))
    assert await down.there() == {kept, kept + ".m"}


async def test_nothing_goes_while_the_server_has_lost_what_replaces_it() -> None:
    """Whoever joins meanwhile begins with what is there."""
    down = Down()
    await down.prepare()
    await down.manifest(old := await down.chunks(1, 1))
    await down.outbox.purge_down(PurgeDown(0, 0, 2))
    assert await down.there() == {old, old + ".m"}


async def test_a_difference_alone_replaces_nothing() -> None:
    """The server has lost the keyframe under it."""
    down = Down()
    await down.prepare()
    await down.manifest(old := await down.chunks(1, 1))
    await down.manifest(later := await down.chunks(3, 1), whole=False)
    await down.outbox.purge_down(PurgeDown(0, 0, 2))
    assert await down.there() == {old, old + ".m", later, later + ".m"}
