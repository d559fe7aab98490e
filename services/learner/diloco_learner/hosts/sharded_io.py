"""One process's part of checkpoints that all hosts of an island write, by Orbax: see `sharded`.

Of Orbax its handlers are taken, which copy, write and read, and not its checkpointers, which let
processes wait for each other at barriers: who waits for whom is the plan's affair (`plan`), with
its limits and by name. Nothing here computes on devices: a program would have to come in one order
in all processes. So whoever writes beside training, or reads, disturbs no order.

    shards.look(name, token)                   # at the beginning: is it what process 0 sees?
    writing = shards.keep(sequence, leaves)    # copied at once, written by another thread
    writing.told()                             # waits: what was written, or why not
    shards.restore(...)                        # leaves, lying as they are told to
"""

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import jax
import xxhash
from jax.sharding import Sharding

from diloco_learner.hosts.sharded import (
    MOMENTS,
    CompleteCheckpoint,
    Damaged,
    Files,
    Told,
    described,
    fault_of,
    is_sequence,
    is_whole,
    share,
)
from diloco_learner.hosts.whole import ReadOn
from diloco_learner.recovery import moments
from diloco_learner.recovery.checkpoint_io import Asking, stored_within_s
from diloco_shared import ambient
from diloco_shared.durable import replace, settle, settle_names

T = TypeVar("T")

SETTING = "DILOCO_HOSTS_CHECKPOINTS"
# What one host has written another one sees at last after so many seconds: network file systems
# remember for up to a minute that something was not there.
SEEN_S = 65.0
# A file of a name that nobody has asked for before.
SIGN_S = 5.0
# What makes one store of the parts of all hosts.
_TOGETHER = f"{MOMENTS}/manifest.ocdbt"
# A host that only looks at a place, or reads a small file there.
LOOK_S = 120.0
# A host that has not stored its part in time has told so after so many seconds more.
TOLD_S = 60.0
# Read at a time, to be hashed.
PIECE_BYTES = 8 << 20
# Of a leaf, written and read as one piece: so another mesh need not read much more than its part.
CHUNK_BYTES = 64 << 20


class Writing:
    """What one process has of a checkpoint, on its way."""

    def __init__(self, said: Told, limit_s: float = 0.0) -> None:
        self.said, self.limit_s = said, limit_s
        self.thread: threading.Thread | None = None

    def begin(self, folder: Any, own: str, futures: Sequence[Any]) -> None:
        """From now on it is written, to `own` within the folder of that checkpoint."""
        work = (folder, own, futures)
        self.thread = threading.Thread(target=self._write, args=work, name="keep", daemon=True)
        self.thread.start()

    def _write(self, folder: Any, own: str, futures: Sequence[Any]) -> None:
        try:
            for future in futures:
                future.result()
            self.said = Told("", hashed(files_in(folder, own)))
        except Exception as error:
            self.said = Told(fault_of(error))

    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def told(self) -> Told:
        """What became of it, once it is written; waits for that, but not for ever."""
        if self.thread is not None:
            self.thread.join(self.limit_s)
        if self.is_alive():
            return Told(f"it was not stored within {self.limit_s:.0f} s")
        return self.said


class Shards:
    """Of one process, in its own place for them. `index`: of this process, of so many `hosts`.

    One checkpoint is written at a time. For one thread, but for `Writing.told`.
    """

    def __init__(
        self, place: str, index: int = 0, hosts: int = 1, reading: ReadOn | None = None
    ) -> None:
        """`reading`: told of what a restore reads, which may take long."""
        self.place, self.index, self.hosts = place, index, hosts
        self.reading = reading or ReadOn()
        self.folder: Any = None  # an epath.Path, once it was looked at
        self.writing: Writing | None = None  # the newest one
        self.asking = Asking("the place of checkpoints")

    # --- the beginning -------------------------------------------------------------------------

    def look(self, name: str, token: str, *, first: bool = False) -> None:
        """Whether this is the folder that process 0 sees, and may be written. Raises OSError.

        `first`: in process 0, which looks before the others are told to.
        """
        if not self.place:
            raise OSError(f"{SETTING} is not set here: it must be set for all hosts of an island")
        _handler()  # seconds: orbax is imported, before training begins
        self.folder = folder = _path(self.place) / name

        def look() -> None:
            if first:
                folder.mkdir(parents=True, exist_ok=True)
                for old in folder.glob(f"{_sign('')}*"):
                    old.unlink(missing_ok=True)
                (folder / _sign(token)).write_text(token)
            elif not seen([folder / _sign(token)], SIGN_S):
                raise OSError(
                    f"{folder} is not the folder that process 0 sees: {SETTING} must name one "
                    "folder that all hosts of the island reach"
                )
            (folder / _sign(token, self.index)).write_text(token)

        self.within(LOOK_S, look)

    def looked(self, token: str) -> None:
        """In process 0: what each host has written there is seen, and removed. Raises OSError."""

        def look() -> None:
            signs = {n: self.folder / _sign(token, n) for n in range(self.hosts)}
            if not seen(list(signs.values()), SIGN_S):
                missing = [n for n, sign in signs.items() if not sign.exists()]
                raise OSError(f"what host {missing[0]} writes in {self.folder} is not seen here")
            for sign in (*signs.values(), self.folder / _sign(token)):
                sign.unlink(missing_ok=True)

        self.within(LOOK_S, look)

    # --- writing -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether one is still being written."""
        return self.writing is not None and self.writing.is_alive()

    def keep(self, sequence: int, leaves: Mapping[str, jax.Array]) -> "Writing":
        """Copy what this process holds of them, and begin to write it. Raises nothing: see `told`.

        Once this returns the arrays may be given to another program. Each part of a leaf is written
        by one process, the first of those that hold it.
        """
        if self.busy:
            return Writing(Told("an earlier checkpoint is still being written"))
        try:
            folder = self._of(sequence)
            futures = asyncio.run(_begin(folder, leaves))
        except Exception as error:  # Orbax raises many kinds: training goes on, whatever it is
            return Writing(Told(fault_of(error)))
        own = f"{MOMENTS}/ocdbt.process_{self.index}"
        self.writing = Writing(Told("nothing was written"), stored_within_s(held_bytes(leaves)))
        self.writing.begin(folder, own, futures)
        return self.writing

    def complete(self, sequence: int, whole: CompleteCheckpoint) -> None:
        """In process 0, once all hosts have written their files, which are `whole`'s: the last of
        it. Raises OSError, also where not all of them are seen."""
        folder = self._of(sequence)
        paths = {name: folder / name for name in whole.files}
        if not seen(list(paths.values())):
            missing = next(name for name, path in paths.items() if not path.exists())
            raise OSError(f"{missing} was written by another host and is not seen in {folder}")
        _handler().finalize(folder / MOMENTS)
        rest = {n: p for n, p in files_in(folder, MOMENTS).items() if n not in paths}
        if _TOGETHER not in rest:
            raise OSError(f"orbax has not put together in {folder} what the hosts have written")
        files = {**whole.files, **hashed(rest)}
        name, data = CompleteCheckpoint(whole.leaves, whole.stacked, files).encoded()
        if "://" in self.place:
            (folder / name).write_bytes(data)  # which is there whole or not at all
            return
        for path in rest.values():
            settle(path)
        for place in {path.parent for path in rest.values()}:
            settle_names(place)  # those of the hosts' own folders are among them
        # Before it: all else is on the disk, and what there is of it after a power cut is whole.
        replace(Path(folder) / name, data)
        settle_names(folder)
        settle_names(folder.parent)

    # --- reading -------------------------------------------------------------------------------

    def sequences(self) -> dict[int, bool]:
        """Those that lie here, and whether each is complete. Raises OSError."""
        if not self.folder.exists():
            return {}
        there = [p for p in self.folder.iterdir() if is_sequence(p.name) and p.is_dir()]
        return {int(p.name): any(is_whole(f.name) for f in p.iterdir()) for p in there}

    def remove(self, sequence: int) -> None:
        """One of them, and nothing where there is none. Raises OSError."""
        folder = self._of(sequence)
        if folder.exists():
            # Last written, first removed: what is left of it in between is not complete.
            for path in folder.iterdir():
                if is_whole(path.name):
                    path.unlink()
            folder.rmtree()

    def restore(
        self,
        sequence: int,
        leaves: Mapping[str, jax.Array],
        lying: Mapping[str, Sharding],
        stacked: str | None,
    ) -> dict[str, jax.Array]:
        """The leaves of a checkpoint, which are to be as these are, lying so. Raises Damaged, also
        where they are not finite, OSError, and whatever Orbax raises.

        The present ones are deleted once its files are found sound, since there may be no room for
        both. A place that hangs while its files are checked is given up before that: what is left
        of this then touches no device, and holds nothing of one.
        """
        wanted, seconds = described(leaves), stored_within_s(held_bytes(leaves))

        def sound() -> None:
            whole = self._whole(sequence)
            whole.check(wanted, stacked)
            self._check(sequence, whole)

        def restore() -> dict[str, jax.Array]:
            found = _read(self._of(sequence) / MOMENTS, wanted, lying)
            wrong = [name for name, leaf in found.items() if not _finite(leaf)]
            if wrong:
                raise Damaged(f"an inner state that is not finite: {', '.join(wrong[:5])}")
            return found

        self.within(seconds, sound)
        for leaf in leaves.values():
            leaf.delete()
        # Orbax does not tell how far it is: so long as it may take, it counts as reading on.
        return self.asking.within(seconds, restore, self.reading.moved)

    def _whole(self, sequence: int) -> CompleteCheckpoint:
        folder = self._of(sequence)
        names = [path for path in folder.iterdir() if is_whole(path.name)]
        if not names:
            raise Damaged("it is not complete")
        return CompleteCheckpoint.decoded(names[0].name, names[0].read_bytes())

    def _check(self, sequence: int, whole: CompleteCheckpoint) -> None:
        folder = self._of(sequence)
        for name in share(whole.files, self.index, self.hosts):
            path = folder / name
            if not path.exists():
                raise Damaged(f"{name} is missing")
            if (path.stat().length, _digest(path, self._moved)) != whole.files[name]:
                raise Damaged(f"{name} is not what was written: it is damaged")

    def _moved(self) -> None:
        """Some more of a file is read; raises OSError where nobody waits for the rest."""
        self.asking.check()
        self.reading.moved()

    # --- waits that end ------------------------------------------------------------------------

    def within(self, seconds: float, work: Callable[[], T]) -> T:
        """What it returns or raises; OSError once it has taken longer, see `Asking`."""
        return self.asking.within(seconds, work)

    def _of(self, sequence: int) -> Any:
        if self.folder is None:
            raise OSError(f"{SETTING} is not set here, or was not looked at")
        return self.folder / str(sequence)


# --------------------------------------------------------------------------------------------------
# Limits: a store that hangs says nothing at all.


def held_bytes(leaves: Mapping[str, jax.Array]) -> int:
    """What this process holds of them, or held before they were deleted."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape))
        * leaf.dtype.itemsize
        * len(leaf.sharding.addressable_devices)
        for leaf in leaves.values()
    )


def seen(paths: Sequence[Any], seconds: float = SEEN_S) -> bool:
    """Whether all are there, in the end: another host has written them."""
    until = ambient.monotonic() + seconds
    while missing := [path for path in paths if not path.exists()]:
        if ambient.monotonic() > until:
            return False
        paths = missing
        time.sleep(0.2)
        for folder in {path.parent for path in missing}:
            if folder.exists():
                list(folder.iterdir())  # asked so, a network file system looks again
    return True


# --------------------------------------------------------------------------------------------------
# Files. A path is an epath.Path, which is a folder's or a bucket's.


def _path(place: str) -> Any:
    from etils import epath

    return epath.Path(place if "://" in place else os.path.abspath(place))


def _sign(token: str, index: int | None = None) -> str:
    return f".look-{token}" + ("" if index is None else f".{index}")


def files_in(folder: Any, within: str) -> dict[str, Any]:
    """All files in or below `within`, which need not be there, by their paths from the folder."""
    found, place = dict[str, Any](), folder / within
    for path in place.iterdir() if place.exists() else ():
        name = f"{within}/{path.name}"
        found |= files_in(folder, name) if path.is_dir() else {name: path}
    return found


def hashed(paths: Mapping[str, Any]) -> Files:
    """Sizes and digests of files."""
    return {name: (path.stat().length, _digest(path)) for name, path in paths.items()}


def _digest(path: Any, moved: Callable[[], object] = lambda: None) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            moved()
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------
# Orbax. It is imported when it is needed: that takes seconds, and most learners do without.


@cache
def _handler() -> Any:
    """What writes and reads leaves, without waiting for other processes or computing anything."""
    import orbax.checkpoint as ocp

    # It tells of every step by absl, in lines of its own. What fails is raised, too.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    arrays = ocp.type_handlers.ArrayHandler(
        # A part that several processes hold would else be cut on the devices.
        use_replica_parallel=False,
        enable_write_sharding_file=False,
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    # Moments hardly become smaller, and packing takes longer than writing.
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


async def _begin(folder: Any, leaves: Mapping[str, jax.Array]) -> Sequence[Any]:
    import orbax.checkpoint as ocp

    save = {name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in leaves}
    args = ocp.args.PyTreeSave(dict(leaves), save_args=save)
    futures: Sequence[Any] = await _handler().async_save(folder / MOMENTS, args=args)
    return futures


def _read(
    folder: Any,
    leaves: Mapping[str, tuple[str, tuple[int, ...]]],
    lying: Mapping[str, Sharding],
) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    wanted = {
        name: ocp.ArrayRestoreArgs(sharding=lying[name], global_shape=shape, dtype=kind)
        for name, (kind, shape) in leaves.items()
    }
    item = dict.fromkeys(leaves, 0)
    args = ocp.args.PyTreeRestore(item=item, restore_args=wanted)
    found: dict[str, jax.Array] = _handler().restore(folder, args=args)
    return found


def _finite(leaf: jax.Array) -> bool:
    """Of what this process holds of it."""
    return all(moments.finite(moments.fetched(s.data)) for s in leaf.addressable_shards)
