"""The parameters in a run-wide checkpoint: read by whoever exports them or begins from them.

Every fragment is compared with the digest that the tape has of it. Not for an event loop: every
function waits for the place of the checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
from numpy.typing import NDArray

from diloco_shared.checkpoints.checkpoints_io import CheckpointError, RunCheckpoints
from diloco_shared.hf.resolving import differing, weights_of
from diloco_shared.hf.weights import HfWeights
from diloco_shared.numerics.arrays import Extent, digest_array, head_bytes, places
from diloco_shared.protocol.checkpoints import CheckpointManifest, Object, ShardPart
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.reach.local import Root
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import Model, RunSpec
from diloco_shared.spec.shapes import shape_of

Values = NDArray[np.float32]
Moved = Callable[[int], object]  # told how many bytes were read so far
# Bytes of an object that are read to learn what is in it: one array has a header of some hundred,
# and an object of many is small.
HEAD_BYTES = 1 << 16


@dataclass(slots=True)
class KeptParameters:
    """Of one checkpoint; `read` gives them tensor by tensor, `anchors` fragment by fragment.

    Nothing but the anchors is fetched, 4 bytes per parameter: what is in an object stands at its
    beginning. Memory: 4 bytes per value of the largest fragment; for `read` 4 bytes per parameter
    more, which grow less with each tensor that is taken.
    """

    there: RunCheckpoints
    ref: str
    manifest: CheckpointManifest
    digest: str  # of the manifest, and so of all that it names
    spec: RunSpec
    parts: list[ShardPart]
    layout: Layout
    moved: Callable[[], object] = lambda: None  # called after every fragment that `read` fetches
    _tensors: dict[str, Values] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of all anchors: what `anchors` fetches."""
        return 4 * sum(self.layout.sizes)

    def anchors(self, moved: Moved = lambda done: None) -> Iterator[tuple[int, int, str, Values]]:
        """(fragment, version, digest, fp32 values (F,)) of every fragment once, in any order.

        Raises ValueError for what is damaged or not whole, OSError where a place does not answer.
        """
        done, seen = 0, set[int]()
        for part, stored, p, place in self._places():
            values_F = self._values(stored, p, place)
            seen.add(p)
            digest = self._checked(part, p, values_F)
            done += values_F.nbytes
            yield p, part.store["versions"][str(p)], digest, values_F
            del values_F
            moved(done)
        if len(seen) != len(self.layout.fragments):
            raise CheckpointError(
                f"{self.ref} has {len(seen)} of {len(self.layout.fragments)} fragments"
            )

    def _places(self) -> Iterator[tuple[ShardPart, Object, int, Extent]]:
        """Where every anchor lies: (part, object, fragment, place in it)."""
        for part in self.parts:
            for stored in part.arrays:
                for name, place in self._in(stored).items():
                    fragment, _, what = name.partition(".")
                    if what == "anchor":
                        yield part, stored, int(fragment), place

    def _in(self, stored: Object) -> dict[str, Extent]:
        """The arrays of an object, of which no more is read than its beginning."""
        head = self.there.some(self.ref, stored, 0, min(HEAD_BYTES, stored.bytes))
        try:
            if (whole := head_bytes(head)) > len(head):
                head = self.there.some(self.ref, stored, 0, whole)
            return places(head, stored.bytes)
        except ValueError as error:
            raise CheckpointError(f"{self.ref}/{stored.key}: it is damaged: {error}") from None

    def _values(self, stored: Object, p: int, place: Extent) -> Values:
        sizes = self.layout.sizes
        if p >= len(sizes) or place.shape != (sizes[p],) or place.dtype != np.float32:
            raise CheckpointError(f"{self.ref}/{stored.key} has no anchor of fragment {p} in it")
        return np.frombuffer(self.there.some(self.ref, stored, place.first, place.end), np.float32)

    @staticmethod
    def _checked(part: ShardPart, p: int, values_F: Values) -> str:
        digest, wanted = digest_array(values_F), part.history["anchor_digests"][p]
        if digest != wanted:
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
        for p, _, _, values_F in self.anchors(lambda done: self.moved()):
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
    model: Model,
    root: Root,
    checkpoints: str,
    further: Sequence[str] = (),
    moved: Callable[[], object] = lambda: None,
) -> HfWeights | KeptParameters | None:
    """The parameters that `model.weights` names, which must be those that the run means.

    None: the run begins from its seed. Folders are looked for in `root`; a checkpoint without an
    address of its own is under `checkpoints`, and an address there or in a further place. Raises
    ValueError and OSError. Reads a folder whole, for its digest; of a checkpoint no array yet.
    `moved` is called whenever some more was read, now and by `read`: what it raises ends that.
    """
    if not model.checkpoint:
        return weights_of(model, root, moved)
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
    kept.moved = moved
    return kept
