"""Run-wide checkpoints in a vault: parts first, the manifest last, digests checked on the way back.

A number may come again, when a power cut has taken the record of it: what a manifest names is never
written over. Parts and arrays carry their digest in the key; `<name>.json` is a copy of the newest.

Not for an event loop: every method waits for the vault.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import xxhash
from pydantic import ValidationError

from diloco_shared.checkpoints.vault_io import Buffer, Vault
from diloco_shared.memory.pages import fill, pages
from diloco_shared.protocol.checkpoints import (
    MANIFEST,
    TAPE,
    CheckpointManifest,
    LearnerPart,
    Object,
    ShardPart,
    parse_reference,
    reference,
)
from diloco_shared.protocol.chunks import digest_bytes as digest_bytes
from diloco_shared.reach.checkpoint_roots import reference_in
from diloco_shared.spec.run import OF_CHECKPOINT, longer_context

Part = TypeVar("Part", ShardPart, LearnerPart)


class Body(Protocol):
    """The bytes of an object, which nobody has in one piece."""

    def __len__(self) -> int: ...

    def pieces(self) -> Iterator[Buffer]:
        """All of them in order, as often as it is asked for."""


class CheckpointError(ValueError):
    """There is no such checkpoint, or it is damaged; the text says what to do."""


class CheckpointMissing(CheckpointError):
    """There is no such checkpoint; the text says which there are."""


class RunCheckpoints:
    """All checkpoints under one root; of many runs, deleted ones too."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.vault = Vault(root)

    @classmethod
    def at(cls, text: str, root: str, further: Sequence[str] = ()) -> tuple["RunCheckpoints", str]:
        """The checkpoints that a reference speaks of, and the reference among them.

        An address of its own must be in `root` or a further one: CheckpointError for any other,
        which is neither listed nor asked.
        """
        try:
            place, folder, number = reference_in(text, root, further)
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        return cls(place), reference(folder, number)

    # --- writing -------------------------------------------------------------------------------

    def write_arrays(self, ref: str, name: str, blobs: Iterable[Body]) -> tuple[Object, ...]:
        """Arrays of a part that is written after them."""
        written = []
        for n, blob in enumerate(blobs):
            digest = _digest_of(blob.pieces())
            key = f"{name}.{n:03d}.{digest}.safetensors"
            self.vault.write_pieces(f"{ref}/{key}", len(blob), blob.pieces())
            written.append(Object(key=key, bytes=len(blob), digest=digest))
        return tuple(written)

    def write_part(self, ref: str, name: str, part: ShardPart | LearnerPart) -> Object:
        """A part whose arrays are there."""
        body = part.model_dump_json().encode()
        stored = _stored(name, part, body)
        self.vault.write(f"{ref}/{stored.key}", body)
        self.vault.write(f"{ref}/{name}.json", body)
        return stored

    def seal(self, ref: str, manifest: CheckpointManifest) -> None:
        """All parts are there: from now on it is a checkpoint. CheckpointError if it was one."""
        if self.vault.read(f"{ref}/{MANIFEST}") is not None:
            raise CheckpointError(f"{ref} is complete already, its record was lost: ask again")
        self.vault.write(f"{ref}/{MANIFEST}", manifest.model_dump_json(indent=1).encode())

    def remove(self, ref: str) -> None:
        """The manifest first: half a checkpoint must not be taken for a whole one."""
        self.vault.write(f"{ref}/{MANIFEST}", None)
        self.vault.remove(ref)

    def remove_folder(self, folder: str) -> None:
        """All of a run: its checkpoints, and its archived tape. CheckpointMissing for nothing."""
        if not self.vault.keys(f"{folder}/"):
            raise CheckpointMissing(f"nothing of a run lies in {self.root}/{folder}")
        for ref in self.complete(folder):
            self.vault.write(f"{ref}/{MANIFEST}", None)
        self.vault.remove(folder)

    # --- reading -------------------------------------------------------------------------------

    def complete(self, folder: str = "") -> list[str]:
        """References of the complete checkpoints of one run, or of all, oldest first."""
        keys = self.vault.keys(f"{folder}/" if folder else "")
        refs = [k.removesuffix(f"/{MANIFEST}") for k in keys if k.endswith(f"/{MANIFEST}")]
        return sorted(ref for ref in refs if _sound(ref))

    def begun(self, folder: str = "") -> list[str]:
        """References of all of a run, or of all runs, of which something is there."""
        keys = self.vault.keys(f"{folder}/" if folder else "")
        found = {key.rpartition("/")[0] for key in keys}
        return sorted(ref for ref in found if _sound(ref))

    def archived(self) -> list[str]:
        """Folders of the runs of which a part of the tape lies there."""
        keys = self.vault.keys("")
        found = {folder for folder, *rest in (key.split("/") for key in keys) if rest[:1] == [TAPE]}
        return sorted(folder for folder in found if _sound(reference(folder, 0)))

    def newest(self, folder: str) -> int:
        """The highest number of a run of which something is there; 0 for none."""
        return max((parse_reference(ref)[2] for ref in self.begun(folder)), default=0)

    def unfinished(self, folder: str = "") -> list[str]:
        """References of those that something is there of, and no manifest."""
        return sorted({*self.begun(folder)} - {*self.complete(folder)})

    def manifest(self, ref: str) -> tuple[CheckpointManifest, str]:
        """(manifest, its digest); CheckpointError names what there is instead."""
        body = self.vault.read(f"{ref}/{MANIFEST}")
        if body is None:
            folder = ref.rpartition("/")[0]
            run = folder.partition(".")[0]
            known = [r for r in self.complete() if r.partition(".")[0] == run] or self.complete()
            listed = ", ".join(known[-10:]) or "none"
            raise CheckpointMissing(f"there is no checkpoint {ref} in {self.root}; known: {listed}")
        try:
            return CheckpointManifest.model_validate_json(body, extra="ignore"), digest_bytes(body)
        except ValidationError as error:
            raise CheckpointError(f"{ref}/{MANIFEST} is damaged: {_first(error)}") from None

    def part(self, ref: str, stored: Object, kind: type[Part]) -> Part:
        """A part as it was written."""
        body = self._object(ref, stored)
        try:
            return kind.model_validate_json(body, extra="ignore")
        except ValidationError as error:
            raise CheckpointError(f"{ref}/{stored.key} is damaged: {_first(error)}") from None

    def written_part(self, ref: str, name: str, kind: type[Part]) -> tuple[Part, Object] | None:
        """A part that is there before the manifest names it, and what the manifest shall say."""
        body = self.vault.read(f"{ref}/{name}.json")
        if body is None:
            return None
        part = kind.model_validate_json(body, extra="ignore")
        return part, _stored(name, part, body)

    def blobs(self, ref: str, part: ShardPart | LearnerPart) -> Iterable[memoryview]:
        """The arrays of a part, blob by blob, checked; each in memory of its own."""
        return (self._whole(ref, stored) for stored in part.arrays)

    def _whole(self, ref: str, stored: Object) -> memoryview:
        whole = _room(ref, stored, stored.bytes)
        _fill(whole, self.pieces(ref, stored))
        return whole

    def pieces(self, ref: str, stored: Object) -> Iterator[bytes]:
        """All bytes of an object in order.

        CheckpointError, in the end, where they are not those that were written.
        """
        hasher, size = xxhash.xxh3_128(), 0
        for piece in self.vault.pieces(f"{ref}/{stored.key}", 0, stored.bytes):
            hasher.update(piece)
            size += len(piece)
            yield piece
        if not size:
            raise _gone(ref, stored)
        _check(ref, stored, hasher.hexdigest())

    def some(self, ref: str, stored: Object, first: int, end: int) -> memoryview:
        """Bytes [first, end) of an object, which whoever takes them has to compare with a digest.

        CheckpointError where they are not there.
        """
        some = _room(ref, stored, end - first)
        if _fill(some, self.vault.pieces(f"{ref}/{stored.key}", first, end - first)) < len(some):
            raise _gone(ref, stored)
        return some

    def _object(self, ref: str, stored: Object) -> bytes:
        body = self.vault.read(f"{ref}/{stored.key}")
        if body is None:
            raise _gone(ref, stored)
        _check(ref, stored, digest_bytes(body))
        return body


def _room(ref: str, stored: Object, size: int) -> memoryview:
    """Memory for so much of an object, whose size is its part's word."""
    try:
        return pages(size)
    except MemoryError:
        text = f"{ref}/{stored.key}: there is no memory for {size} bytes of it"
        raise CheckpointError(text) from None


def _fill(whole: memoryview, pieces: Iterable[Buffer]) -> int:
    """Put them there one after the other; how many bytes they were."""
    at = 0
    for piece in pieces:
        fill(whole[at : at + len(piece)], piece)
        at += len(piece)
    return at


def _gone(ref: str, stored: Object) -> CheckpointError:
    return CheckpointError(f"{ref}/{stored.key} is gone: the checkpoint is not whole")


def _check(ref: str, stored: Object, found: str) -> None:
    if found != stored.digest:
        raise CheckpointError(
            f"{ref}/{stored.key} has digest {found}, its manifest says {stored.digest}: it is "
            "damaged, restore another checkpoint"
        )


def begun_from(model: Mapping[str, Any], root: str, further: Sequence[str] = ()) -> dict[str, Any]:
    """A run's table [model] with what its checkpoint says of the model, and its digest.

    `model.weights` reads "checkpoint:" and a reference; one without an address is under `root`,
    and an address is in `root` or in a further place.
    Overrides in the table stay, beside the checkpoint's. Any other table is left as it is, and so
    is one with a digest. Reads the manifest, which names all that it means by digest. Raises
    CheckpointError, VaultError.
    """
    named = model.get("weights")
    if not isinstance(named, str) or not named.startswith(OF_CHECKPOINT):
        return dict(model)
    if model.get("weights_digest"):
        return dict(model)
    there, ref = RunCheckpoints.at(named.removeprefix(OF_CHECKPOINT), root, further)
    manifest, digest = there.manifest(ref)
    source = manifest.spec.get("model", {})
    found = {**model, "weights_digest": digest}
    found |= {name: source[name] for name in ("preset", "factory") if source.get(name)}
    found["overrides"] = {**(source.get("overrides") or {}), **(model.get("overrides") or {})}
    if found.get("factory"):
        found["parameters"] = model.get("parameters") or manifest.parameters
        return found
    made_for = (source.get(name) or 0 for name in ("context_tokens", "weights_context"))
    return found | longer_context(max(made_for), model)


def _digest_of(pieces: Iterable[Buffer]) -> str:
    hasher = xxhash.xxh3_128()
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def _stored(name: str, part: ShardPart | LearnerPart, body: bytes) -> Object:
    digest, size = digest_bytes(body), len(body) + sum(a.bytes for a in part.arrays)
    return Object(key=f"{name}.{digest}.json", bytes=size, digest=digest)


def _sound(ref: str) -> bool:
    try:
        return reference(*parse_reference(ref)[1:]) == ref
    except ValueError:
        return False


def _first(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
