"""Durable snapshots of store and history in a local folder; a torn one is never taken for good.

    <data>/<syncer>/snapshots/<run>/[shard-<n>/]snapshot-<tape sequence>/
        meta.json            what it covers; the table of its files; `History.meta`, the store's
        3.<digest>.arrays    all arrays of fragment 3 back to back, as the table lists them

Nothing in it says who wrote it: it belongs to the run and the shard. What has not changed since the
snapshot before is a hard link to its file, so that a snapshot writes only what rounds have changed,
and a file is the same file wherever its name is the same. Arrays go to the file and come back from
it one by one: beside them a snapshot takes no memory. Older snapshots are one file of safetensors.
"""

import hashlib
import json
import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from diloco_shared.durable import make_folder, replace, settle, settle_names
from diloco_shared.process.crash_points import passing
from diloco_shared.process.disk_room import DiskRoom
from diloco_syncer.merging.anchor_files_io import FileShelf
from diloco_syncer.merging.store import PREVIOUS, Shelf

# In a syncer's data folder: one folder per run.
SNAPSHOTS = "snapshots"
# Two: the newest may be torn by a power cut that the file system did not survive.
KEEP = 2
META = "meta.json"
# Of snapshots before they were cut by fragment.
ARRAYS = "arrays.safetensors"
# What is being written, or was when the process died.
ASIDE = ".writing-"
# Where files of a snapshot that is being received wait until all of them are there.
RECEIVED = ".received"
# Bytes that are hashed and written at a time: they stay in the processor's cache between the two.
STRETCH = 1 << 20

Array = NDArray[Any]
_FOLDER = re.compile(r"snapshot-[0-9]{12,}")  # not one that somebody set aside under another name
_NAME = re.compile(r"[0-9a-z-]+\.[0-9a-f]{32}\.arrays")


def folder_of(data: Path, run_folder: str, shard: int) -> Path:
    """Where a syncer whose data folder is `data` keeps the snapshots of a run's shard."""
    own = data / SNAPSHOTS / run_folder
    return own / f"shard-{shard}" if shard else own


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Listed:
    """One file of a snapshot, as its table has it: (name, dtype, shape) of every array in order."""

    name: str
    digest: str
    bytes: int
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> "Listed":
        """ValueError, KeyError or TypeError for what is none: it may come from elsewhere."""
        listed = cls(
            entry["name"],
            entry["digest"],
            int(entry["bytes"]),
            tuple((name, dtype, tuple(shape)) for name, dtype, shape in entry["arrays"]),
        )
        if not _NAME.fullmatch(listed.name) or listed.name.split(".")[1] != listed.digest:
            raise ValueError(f"{listed.name[:80]!r} is no name of a file of digest {listed.digest}")
        return listed

    def entry(self) -> dict[str, Any]:
        arrays = [[name, dtype, list(shape)] for name, dtype, shape in self.arrays]
        return {"name": self.name, "digest": self.digest, "bytes": self.bytes, "arrays": arrays}


@dataclass(frozen=True, slots=True)
class _Written:
    """A file that holds exactly these arrays, while they live: they are never written to."""

    listed: Listed
    folder: Path
    arrays: "tuple[weakref.ref[Array], ...]"

    def holds(self, arrays: list[Array]) -> bool:
        return len(arrays) == len(self.arrays) and all(
            ref() is array for ref, array in zip(self.arrays, arrays, strict=True)
        )


class BrokenOff(Exception):
    """Nobody wants the snapshot any more that was being written."""


class SnapshotStore:
    """Folders `snapshot-<tape sequence>`, each complete or absent (written aside, renamed).

    Of one run and shard. One thread writes at a time, for what lies aside is removed before the
    next is written: a leader that was deposed may still be writing when it stands by. A snapshot
    that is `pinned` is not removed.
    """

    def __init__(self, folder: Path, keep: int = KEEP, shelf: Shelf | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.shelf: Shelf = shelf or FileShelf(folder)  # for stores whose snapshots these are
        without = "rounds go on; until one is written a restart has more of the tape to execute"
        self.room = DiskRoom(folder, "a snapshot", without)
        # By who hands it over, so that none takes away what another needs.
        self.pinned: dict[str, int] = {}
        self.bytes_written = 0  # of arrays, ever
        self._newest: dict[str, _Written] = {}  # by fragment
        self._writing = threading.Lock()
        # Snapshots of others that are on their way here. The lock is never held for long.
        self._handovers, self._handing = 0, threading.Lock()

    # --- writing -------------------------------------------------------------------------------

    def save(
        self,
        covers: int,
        meta: dict[str, Any],
        arrays: dict[str, Array],
        broken_off: Callable[[], bool] = lambda: False,
    ) -> Path:
        """Write and sync; returns its path. Raises OSError (disk full) and leaves no debris.

        `arrays` is emptied: what is written is let go, for rounds replace it meanwhile. Raises
        BrokenOff between two fragments once it is `broken_off`, and behind the last one.
        """
        with self._writing, self.room.writing(sum(array.nbytes for array in arrays.values())):
            return self._save(covers, meta, arrays, broken_off)

    def _save(
        self,
        covers: int,
        meta: dict[str, Any],
        arrays: dict[str, Array],
        broken_off: Callable[[], bool],
    ) -> Path:
        aside = self._aside(covers)
        self._forget_received()
        written: dict[str, _Written] = {}
        try:
            for fragment in dict.fromkeys(name.partition(".")[0] for name in arrays):
                if broken_off():
                    raise BrokenOff
                names = [name for name in arrays if name.partition(".")[0] == fragment]
                of_it = {name: arrays.pop(name) for name in names}
                written[fragment] = self._file(aside, fragment, of_it)
                del of_it
            passing("snapshot")
            table = [file.listed.entry() for file in written.values()]
            body = {"covers": covers, "files": table, "meta": meta}
            _write_text(aside / META, json.dumps(body, allow_nan=False))
            if broken_off():  # else one of a history that is lost would be the newest here
                raise BrokenOff
            final = self._in_place(aside, covers)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._newest = {
            fragment: _Written(file.listed, final, file.arrays)
            for fragment, file in written.items()
        }
        return final

    def _file(self, aside: Path, fragment: str, arrays: dict[str, Array]) -> _Written:
        """The arrays of one fragment: linked if they are in a file already, else written."""
        known = self._newest.get(fragment)
        values = list(arrays.values())
        if known is not None and known.holds(values) and _linked(known, aside):
            return known
        temporary = aside / f"{fragment}.writing"
        with temporary.open("wb") as file:
            digest, size = _write(file, values)
            file.flush()
            os.fsync(file.fileno())
        self.bytes_written += size
        table = tuple((name, a.dtype.str, a.shape) for name, a in arrays.items())
        listed = Listed(f"{fragment}.{digest}.arrays", digest, size, table)
        temporary.rename(aside / listed.name)
        return _Written(listed, aside, tuple(weakref.ref(array) for array in values))

    def _aside(self, covers: int) -> Path:
        make_folder(self.folder)
        # What a dead process left, whatever it was to cover, may be what fills the disk.
        for left in self.folder.glob(f"{ASIDE}*"):
            shutil.rmtree(left, ignore_errors=True)
        aside = self.folder / f"{ASIDE}{covers:012d}"
        aside.mkdir()
        return aside

    def _in_place(self, aside: Path, covers: int) -> Path:
        """What is complete aside becomes a snapshot; what is too old goes."""
        final = self._path(covers)
        replaces = final.exists()
        settle_names(aside)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        try:
            settle_names(self.folder)
        except OSError:
            if not replaces:
                # Nobody is told of it. Where every one fails so, all of them would fill the disk.
                shutil.rmtree(final, ignore_errors=True)
            raise
        pinned = {self._path(covers) for covers in list(self.pinned.values())}
        for old in self._all()[: -self.keep]:
            if old not in pinned:
                shutil.rmtree(old, ignore_errors=True)
        return final

    def quiet(self, within_s: float) -> bool:
        """Wait until none is being written, for so many seconds at most; whether none is."""
        if not self._writing.acquire(timeout=within_s):
            return False
        self._writing.release()
        return True

    def remove(self, covers: int) -> None:
        """One that is of no use to anybody. Raises OSError."""
        shutil.rmtree(self._path(covers))

    # --- reading -------------------------------------------------------------------------------

    def newest(
        self, made: Callable[[dict[str, Any], dict[str, Array]], T]
    ) -> tuple[T | None, list[str]]:
        """What is `made` of (meta, arrays) of the newest sound snapshot, and why others were passed
        over: also those of which it cannot be made. None where there is no other.

        Previous anchors are on the shelf.
        """
        faults: list[str] = []
        for path in reversed(self._all()):
            try:
                return made(*self._load(path)), faults
            except (OSError, ValueError, KeyError, TypeError) as error:
                faults.append(f"{path.name}: {error}")
        return None, faults

    def covers(self) -> list[int]:
        """The tape records that the snapshots here cover, ascending."""
        return [_covered(path) for path in self._all()]

    def sound(self, covers: int) -> bool:
        """Whether all files of one are there as its table says; False for one of an older form."""
        path = self._path(covers)
        try:
            table = table_of((path / META).read_bytes())
        except (OSError, ValueError):
            return False
        return bool(table) and all(_sound(path / listed.name, listed) for listed in table)

    def load(self, covers: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """(meta, arrays) of one; OSError, ValueError, KeyError or TypeError if it is not sound."""
        return self._load(self._path(covers))

    def _load(self, path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
        body = json.loads((path / META).read_text(encoding="utf-8"))
        if "files" not in body:
            return body["meta"], self._load_single(path / ARRAYS, body["arrays"])
        arrays: dict[str, Array] = {}
        found: dict[str, _Written] = {}
        for listed in map(Listed.of, body["files"]):
            of_it = dict(self._arrays(path / listed.name, listed))
            arrays |= of_it
            fragment = listed.name.partition(".")[0]
            refs = tuple(weakref.ref(array) for array in of_it.values())
            found[fragment] = _Written(listed, path, refs)
        self._newest = found
        return body["meta"], arrays

    def _arrays(self, path: Path, listed: Listed) -> Iterator[tuple[str, Array]]:
        """The arrays of one file, each read into memory of its own; all are checked at the end."""
        hasher = xxhash.xxh3_128()
        with path.open("rb") as file:
            for name, dtype, shape in listed.arrays:
                array = np.empty(shape, np.dtype(dtype))
                _read(file, array, hasher)
                yield name, self._shelved(name, array)
            if file.read(1) or hasher.hexdigest() != listed.digest:
                raise ValueError(f"{path.name} does not match its digest")

    def _load_single(self, path: Path, digest: str) -> dict[str, Array]:
        if _old_digest(path) != digest:
            raise ValueError("the arrays do not match their digest")
        try:
            with safe_open(path, framework="numpy") as file:
                return {name: self._shelved(name, file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{path.name} holds no arrays: {error}") from None

    def _shelved(self, name: str, array: Array) -> Array:
        return self.shelf(array) if name.endswith(f".{PREVIOUS}") else array

    # --- handing over --------------------------------------------------------------------------

    def newest_meta(self) -> tuple[int, bytes] | None:
        """(covers, meta.json) of the newest that is cut by fragment; None when there is none."""
        for path in self._all()[::-1]:
            try:
                body = (path / META).read_bytes()
                if table_of(body):
                    return _covered(path), body
            except (OSError, ValueError):
                continue  # torn, or removed meanwhile
        return None

    def file(self, covers: int, digest: str) -> Path | None:
        """The file of this digest in the snapshot of record `covers`; None if it is gone."""
        found = sorted(self._path(covers).glob(f"*.{digest}.arrays"))
        return found[0] if found else None

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Another's snapshot is on its way until the end of the block: what comes of it stays."""
        with self._handing:
            self._handovers += 1
        try:
            yield
        finally:
            with self._handing:
                self._handovers -= 1

    def _forget_received(self) -> None:
        """Of another's snapshot, which whoever writes one of its own needs no more: it came as far
        by another way, and this may be what fills the disk. Raises OSError.
        """
        aside = self.folder / f"{ASIDE}received"
        with self._handing:
            if self._handovers:
                return
            with suppress(FileNotFoundError):
                (self.folder / RECEIVED).rename(aside)
        shutil.rmtree(aside, ignore_errors=True)

    def missing(self, meta: bytes) -> list[Listed]:
        """Files of another's snapshot that are not here yet, neither received nor in one of ours.

        What was received of others is removed. Raises ValueError for a table that cannot be.
        """
        table = table_of(meta)
        received = self.folder / RECEIVED
        make_folder(received)
        for path in received.iterdir():
            if path.name not in {listed.name for listed in table}:
                path.unlink()
        for listed in table:
            for own in self._all():
                if not (received / listed.name).exists() and _sound(own / listed.name, listed):
                    _link(own / listed.name, received / listed.name)
        return [listed for listed in table if not _sound(received / listed.name, listed)]

    def receive(self, listed: Listed, body: bytes | memoryview) -> None:
        """Keep one file of another's snapshot. ValueError if it is not what its table says."""
        if len(body) != listed.bytes or xxhash.xxh3_128_hexdigest(body) != listed.digest:
            raise ValueError(f"{listed.name} does not match its digest")
        replace(self.folder / RECEIVED / listed.name, body)

    def adopt(self, covers: int, meta: bytes) -> Path:
        """Another's snapshot, all of whose files were received. Raises OSError."""
        with self._writing:
            return self._adopt(covers, meta)

    def _adopt(self, covers: int, meta: bytes) -> Path:
        aside, received = self._aside(covers), self.folder / RECEIVED
        try:
            for listed in table_of(meta):
                _link(received / listed.name, aside / listed.name)
            _write_text(aside / META, meta.decode("utf-8"))
            final = self._in_place(aside, covers)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        shutil.rmtree(received, ignore_errors=True)
        return final

    def _path(self, covers: int) -> Path:
        return self.folder / f"snapshot-{covers:012d}"

    def _all(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if _FOLDER.fullmatch(p.name))


def table_of(meta: bytes) -> list[Listed]:
    """The files that a meta.json lists, none in an older one. ValueError when it is damaged."""
    try:
        return [Listed.of(entry) for entry in json.loads(meta).get("files", ())]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{META} is damaged: {error}") from None


def _covered(path: Path) -> int:
    """The record that the snapshot in this folder covers."""
    return int(path.name.removeprefix("snapshot-"))


def _link(there: Path, here: Path) -> None:
    """The same file under another name; a copy where there are no links."""
    try:
        os.link(there, here)
    except OSError:
        shutil.copyfile(there, here)
        settle(here)


def _linked(known: _Written, aside: Path) -> bool:
    """Whether a link to the file could be made: it may be gone, or there are no links there."""
    name = known.listed.name
    try:
        if (known.folder / name).stat().st_size != known.listed.bytes:
            return False
        os.link(known.folder / name, aside / name)
    except OSError:
        return False
    return True


def _bytes_of(array: Array) -> memoryview:
    """A view of what an array holds; of one that does not lie in one piece, a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write(file: BinaryIO, arrays: list[Array]) -> tuple[str, int]:
    """Write them back to back; (digest, bytes)."""
    hasher, size = xxhash.xxh3_128(), 0
    for array in arrays:
        data = _bytes_of(array)
        for at in range(0, len(data), STRETCH):
            hasher.update(data[at : at + STRETCH])
            file.write(data[at : at + STRETCH])
        size += len(data)
    return hasher.hexdigest(), size


def _read(file: BinaryIO, array: Array, hasher: Any) -> None:
    """Fill an array; ValueError when the file ends before."""
    data = array.reshape(-1).view(np.uint8).data
    for at in range(0, len(data), STRETCH):
        stretch = data[at : at + STRETCH]
        if file.readinto(stretch) != len(stretch):  # type: ignore[attr-defined]
            raise ValueError("it ends too early")
        hasher.update(stretch)


def _sound(path: Path, listed: Listed) -> bool:
    """Whether a file is there and holds what the table says."""
    try:
        if path.stat().st_size != listed.bytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest() == listed.digest
    except OSError:
        return False


def _old_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    settle(path)
