"""Reads the parameters of a run-wide checkpoint for an export, without holding up its event loop.

Memory: one object of the checkpoint as it is stored and the arrays in it, about 8 bytes per value
of the largest fragment.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from diloco_learner.exporting.assembling import Values
from diloco_learner.exporting.observing_io import UnreadableRun
from diloco_shared.checkpoints.parameters_io import open_kept
from diloco_shared.protocol.checkpoints import CheckpointManifest
from diloco_shared.protocol.exports import ExportedFragment
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec

Moved = Callable[[int, int], None]  # (bytes read, bytes that there are to read)


class Checkpointed:
    """The parameters of one checkpoint. `begin`, then `fragments` once."""

    layout: Layout
    spec: RunSpec
    manifest: CheckpointManifest

    def __init__(self, source: str, root: str, moved: Moved, places: Sequence[str] = ()) -> None:
        """`source`: FOLDER/NUMBER under `root`, or an address there or in one of the places."""
        self.source, self.root, self.places = source, root, places
        self.moved = moved

    @property
    def epoch(self) -> int:
        return self.manifest.epoch

    @property
    def fetch_bytes(self) -> int:
        """Of all arrays of the syncer's shards."""
        return self.kept.bytes

    async def begin(self) -> None:
        """Read what describes it. Raises UnreadableRun."""
        try:
            self.kept = await asyncio.to_thread(open_kept, self.source, self.root, self.places)
        except (ValueError, OSError) as error:  # a CheckpointError, a VaultError, another release's
            raise UnreadableRun(str(error)) from None
        self.layout, self.spec, self.manifest = (
            self.kept.layout,
            self.kept.spec,
            self.kept.manifest,
        )

    async def fragments(self) -> AsyncIterator[tuple[ExportedFragment, Values]]:
        """Every fragment once. Raises UnreadableRun."""
        iterator = self.kept.anchors(lambda done: self.moved(done, self.fetch_bytes))
        stamp = self.manifest.stamp
        while True:
            try:
                found = await asyncio.to_thread(next, iterator, None)
            except (ValueError, OSError, KeyError) as error:
                raise UnreadableRun(f"{self.kept.ref} cannot be read: {error}") from None
            if found is None:
                return
            fragment, version, digest, values_F = found
            yield (
                ExportedFragment(
                    fragment=fragment,
                    version=version,
                    round=stamp.round,
                    steps=stamp.steps,
                    digest=digest,
                ),
                values_F,
            )
            del found, values_F

    async def tokens(self) -> tuple[int | None, int | None]:
        """A checkpoint's ledger is the syncer's to read."""
        return None, None
