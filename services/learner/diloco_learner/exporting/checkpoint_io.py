"""Reads the parameters of a run-wide checkpoint, every digest checked.

Memory: one object of the checkpoint as it is stored and the arrays in it, about 8 bytes per value
of the largest fragment. All arrays of a checkpoint are read, since an object does not say by its
name what is in it; only the anchors are taken.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import numpy as np

from diloco_learner.exporting.assembling import Values
from diloco_learner.exporting.observing_io import Unreadable
from diloco_shared.checkpoints.checkpoints_io import RunCheckpoints
from diloco_shared.numerics.arrays import Layout, digest_array, unpack
from diloco_shared.protocol.checkpoints import CheckpointManifest, ShardPart
from diloco_shared.protocol.exports import ExportedFragment
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.spec.run import RunSpec

Moved = Callable[[int, int], None]  # (bytes read, bytes that there are to read)


class Checkpointed:
    """The parameters of one checkpoint. `begin`, then `fragments` once."""

    layout: Layout
    spec: RunSpec
    manifest: CheckpointManifest

    def __init__(self, source: str, root: str, moved: Moved) -> None:
        """`source`: FOLDER/NUMBER under `root`, or an address of its own."""
        self.source, self.root = source, root
        self.moved = moved
        self._parts: list[ShardPart] = []

    @property
    def epoch(self) -> int:
        return self.manifest.epoch

    @property
    def fetch_bytes(self) -> int:
        """Of all arrays of the syncer's shards."""
        return sum(stored.bytes for part in self._parts for stored in part.arrays)

    async def begin(self) -> None:
        """Read what describes it. Raises Unreadable."""
        try:
            await asyncio.to_thread(self._begin)
        except (ValueError, OSError) as error:  # a CheckpointError, a VaultError, another release's
            raise Unreadable(str(error)) from None

    def _begin(self) -> None:
        self.there, self.ref = RunCheckpoints.at(self.source, self.root)
        self.manifest, _ = self.there.manifest(self.ref)
        self.spec = RunSpec.model_validate(self.manifest.spec)
        self._parts = [self.there.part(self.ref, o, ShardPart) for o in self.manifest.shards]
        store = self._parts[0].store
        tensors = [
            TensorSpec(name=t["name"], shape=tuple(t["shape"]), embedding=t["embedding"])
            for t in store["tensors"]
        ]
        self.layout = Layout.build(tensors, store["cut_into"])
        if store.get("layout", self.layout.digest()) != self.layout.digest():
            raise ValueError(
                f"{self.ref} cuts the tensors otherwise than this program: export with the release "
                "that wrote it"
            )

    async def fragments(self) -> AsyncIterator[tuple[ExportedFragment, Values]]:
        """Every fragment once. Raises Unreadable."""
        iterator, seen = self._anchors(), set[int]()
        while True:
            try:
                found = await asyncio.to_thread(next, iterator, None)
            except (ValueError, OSError, KeyError) as error:
                raise Unreadable(f"{self.ref} cannot be read: {error}") from None
            if found is None:
                break
            seen.add(found[0].fragment)
            yield found
            del found
        if len(seen) != len(self.layout.fragments):
            raise Unreadable(
                f"{self.ref} has {len(seen)} of {len(self.layout.fragments)} fragments"
            )

    def _anchors(self) -> Iterator[tuple[ExportedFragment, Values]]:
        done = 0
        for part in self._parts:
            blobs = zip(part.arrays, self.there.blobs(self.ref, part), strict=True)
            for stored, blob in blobs:
                for name, values_F in unpack(blob).items():
                    fragment, _, what = name.partition(".")
                    if what == "anchor":
                        yield self._checked(part, int(fragment), values_F), values_F
                done += stored.bytes
                self.moved(done, self.fetch_bytes)

    def _checked(self, part: ShardPart, p: int, values_F: Values) -> ExportedFragment:
        digest, wanted = digest_array(values_F), part.history["anchor_digests"][p]
        if digest != wanted or values_F.dtype != np.float32:
            raise ValueError(f"fragment {p} has digest {digest}, and was recorded as {wanted}")
        stamp = self.manifest.stamp
        return ExportedFragment(
            fragment=p,
            version=part.store["versions"][str(p)],
            round=stamp.round,
            steps=stamp.steps,
            digest=digest,
        )

    async def tokens(self) -> tuple[int | None, int | None]:
        """A checkpoint's ledger is the syncer's to read."""
        return None, None
