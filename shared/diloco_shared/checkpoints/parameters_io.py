"""The parameters in a run-wide checkpoint: read by whoever exports them or begins from them.

Every object is compared with its digest, and every fragment with the digest that the tape has of
it. Not for an event loop: every function waits for the place of the checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from diloco_shared.checkpoints.checkpoints_io import CheckpointError, RunCheckpoints
from diloco_shared.hf.resolving import differing, weights_of
from diloco_shared.hf.weights import HfWeights
from diloco_shared.numerics.arrays import Layout, digest_array, unpack
from diloco_shared.protocol.checkpoints import CheckpointManifest, ShardPart
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.reach.local import Root
from diloco_shared.spec.run import Model, RunSpec
from diloco_shared.spec.shapes import shape_of

Values = NDArray[np.float32]
Moved = Callable[[int], None]  # told how many bytes were read so far


@dataclass(slots=True)
class KeptParameters:
    """Of one checkpoint; `read` gives them tensor by tensor, `anchors` fragment by fragment.

    Memory: an object of the checkpoint and the arrays in it, about 8 bytes per value of the largest
    fragment; for `read` 4 bytes per parameter more, which grow less with each tensor that is taken.
    All arrays of a checkpoint are fetched, since an object does not say by its name what is in it.
    """

    there: RunCheckpoints
    ref: str
    manifest: CheckpointManifest
    digest: str  # of the manifest, and so of all that it names
    spec: RunSpec
    parts: list[ShardPart]
    layout: Layout
    _tensors: dict[str, Values] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all arrays of the syncer's shards."""
        return sum(stored.bytes for part in self.parts for stored in part.arrays)

    def anchors(self, moved: Moved = lambda done: None) -> Iterator[tuple[int, int, str, Values]]:
        """(fragment, version, digest, fp32 values (F,)) of every fragment once, in any order.

        Raises ValueError for what is damaged or not whole, OSError where a place does not answer.
        """
        done, seen = 0, set[int]()
        for part in self.parts:
            blobs = zip(part.arrays, self.there.blobs(self.ref, part), strict=True)
            for stored, blob in blobs:
                for name, values_F in unpack(blob).items():
                    fragment, _, what = name.partition(".")
                    if what == "anchor":
                        p = int(fragment)
                        seen.add(p)
                        digest = self._checked(part, p, values_F)
                        yield p, part.store["versions"][str(p)], digest, values_F
                done += stored.bytes
                moved(done)
        if len(seen) != len(self.layout.fragments):
            raise CheckpointError(
                f"{self.ref} has {len(seen)} of {len(self.layout.fragments)} fragments"
            )

    @staticmethod
    def _checked(part: ShardPart, p: int, values_F: Values) -> str:
        digest, wanted = digest_array(values_F), part.history["anchor_digests"][p]
        if digest != wanted or values_F.dtype != np.float32:
            raise CheckpointError(f"fragment {p} has digest {digest}, and was recorded as {wanted}")
        return digest

    def read(self, name: str) -> Values:
        """A tensor in its own shape. Each is given once, and no memory is left of it here.

        Raises ValueError for one that the checkpoint does not have, and as `anchors` does.
        """
        if not any(t.name == name for t in self.layout.tensors):
            raise CheckpointError(f"{self.ref} has no tensor {name!r}: it is of another model")
        if name not in self._tensors:
            self._tensors = self._all()
        return self._tensors.pop(name)

    def _all(self) -> dict[str, Values]:
        found = {t.name: np.empty(t.shape, np.float32) for t in self.layout.tensors}
        for p, _, _, values_F in self.anchors():
            for piece in self.layout.fragments[p]:
                values = values_F[piece.offset : piece.offset + piece.size]
                rows = found[piece.name]
                if piece.whole:
                    rows[...] = values.reshape(rows.shape)
                else:
                    rows[piece.start : piece.stop] = values.reshape(piece.piece_shape)
        return found


def open_kept(source: str, root: str, further: Sequence[str] = ()) -> KeptParameters:
    """What describes the parameters of a checkpoint: FOLDER/NUMBER under `root`, or an
    address in `root` or in a further place.

    Raises ValueError (CheckpointError where there is none), and OSError.
    """
    there, ref = RunCheckpoints.at(source, root, further)
    manifest, digest = there.manifest(ref)
    parts = [there.part(ref, stored, ShardPart) for stored in manifest.shards]
    store = parts[0].store
    tensors = [
        TensorSpec(name=t["name"], shape=tuple(t["shape"]), embedding=t["embedding"])
        for t in store["tensors"]
    ]
    layout = Layout.build(tensors, store["cut_into"])
    if store.get("layout", layout.digest()) != layout.digest():
        raise CheckpointError(
            f"{ref} cuts the tensors otherwise than this program: read it with the release that "
            "wrote it"
        )
    spec = RunSpec.model_validate(manifest.spec)
    return KeptParameters(there, ref, manifest, digest, spec, parts, layout)


# --------------------------------------------------------------------------------------------------
# What a run begins from.


def beginning_of(
    model: Model, root: Root, checkpoints: str, further: Sequence[str] = ()
) -> HfWeights | KeptParameters | None:
    """The parameters that `model.weights` names, which must be those that the run means.

    None: the run begins from its seed. Folders are looked for in `root`; a checkpoint without an
    address of its own is under `checkpoints`, and an address there or in a further place. Raises
    ValueError and OSError. Reads a folder whole, for its digest; of a checkpoint no array yet.
    """
    if not model.checkpoint:
        return weights_of(model, root)
    kept = open_kept(model.checkpoint, checkpoints, further)
    if kept.digest != model.weights_digest:
        raise CheckpointError(
            f"{kept.ref} in {kept.there.root} is another checkpoint than the run begins from: its "
            f"digest is {kept.digest}, and model.weights_digest is {model.weights_digest}"
        )
    if model.factory is None and kept.spec.model.factory is None:
        there, wanted = asdict(shape_of(kept.spec.model)), asdict(shape_of(model))
        if wrong := differing(there, wanted):
            raise CheckpointError(f"{kept.ref} is of a model of another shape: {wrong}")
    return kept
