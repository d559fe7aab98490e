"""What becomes of payloads that somebody fetches and does not get: states of a world.

Nobody outside sees it, since neither a syncer nor a learner tells what it gives up.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from diloco_learner.exchange.downlink_io import Downlink
from diloco_shared.bus.blobs import BlobIncomplete
from diloco_shared.protocol.messages import ContributionManifest
from diloco_syncer.events import Effect, Event, Malformed
from diloco_syncer.machine import Machine
from diloco_syncer.messages.inbox_io import Inbox


class Fetches:
    """Of one world."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts

    @contextmanager
    def used(self) -> Iterator[None]:
        """Until the end of the block they are counted."""
        fetch, refuse, handle = Inbox._while_wanted, Downlink._refuse_manifest, Machine.handle
        counts = self.counts

        async def fetched(inbox: Inbox, manifest: ContributionManifest) -> memoryview | None:
            try:
                payload = await fetch(inbox, manifest)
            except BlobIncomplete:
                counts["contributions refused: incomplete"] += 1
                raise
            counts["contributions given up: no round waits"] += payload is None
            return payload

        def refused(downlink: Downlink, subject: str, kind: str, reason: str) -> None:
            counts["publications refused: incomplete"] += kind == "incomplete"
            refuse(downlink, subject, kind, reason)

        def handled(machine: Machine, event: Event, now: float) -> list[Effect]:
            if isinstance(event, Malformed) and event.kind == "no-room":
                what = "contributions" if event.answer else "initial parameters"
                counts[f"{what} refused: no-room"] += 1
            return handle(machine, event, now)

        Inbox._while_wanted, Downlink._refuse_manifest = fetched, refused  # type: ignore
        Machine.handle = handled  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            Inbox._while_wanted, Downlink._refuse_manifest = fetch, refuse  # type: ignore
            Machine.handle = handle  # type: ignore[method-assign]
