"""A checkpoint that all hosts of an island write: where its parts lie, and whether it is whole.

    PLACE/RUN/LEARNER/SEQUENCE/moments/...               as Orbax writes them: see `sharded_io`
    PLACE/RUN/LEARNER/SEQUENCE/whole.DIGEST.json         `CompleteCheckpoint`, written last

One without the last file is not complete. Orbax does not notice a byte that has changed in what it
reads, so `CompleteCheckpoint` tells the digest of every file; each host checks its share of them.

Leaves are stored as they lie in memory, under their own names: one of them may hold all layers.
Then every device's part is written as it is. Stored by tensor, as `moments` does, each layer would
first be cut out of its leaf by a program of all devices. `CompleteCheckpoint` tells which leaves
hold layers (`stacked`), so that a release in which they lie otherwise can read a layer's part of
one. How leaves are shared among devices is no part of the format.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from diloco_learner.hosts import plan
from diloco_learner.models import from_named, to_named
from diloco_learner.training.trainer import Trainer
from diloco_shared.protocol.chunks import digest_bytes

# Of what went wrong, in letters.
TEXT_MAX = 300
# What the moments lie in, and the file that makes them count.
MOMENTS = "moments"
_WHOLE = re.compile(r"whole\.([0-9a-f]{32})\.json")
_SEQUENCE = re.compile(r"\d{1,32}")
# A file by its path within the checkpoint: its bytes, and their digest.
Files = Mapping[str, tuple[int, str]]
# A leaf by its name: its type and shape.
Leaves = Mapping[str, tuple[str, tuple[int, ...]]]


class Damaged(ValueError):
    """A checkpoint that cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class CompleteCheckpoint:
    """What a complete checkpoint consists of."""

    leaves: Leaves
    stacked: str | None  # in the path of leaves that hold all layers
    files: Files

    def encoded(self) -> tuple[str, bytes]:
        """(name of its file, what stands in it)."""
        fields = {"leaves": self.leaves, "stacked": self.stacked, "files": self.files}
        data = json.dumps(fields, sort_keys=True).encode()
        return f"whole.{digest_bytes(data)}.json", data

    @classmethod
    def decoded(cls, name: str, data: bytes) -> "CompleteCheckpoint":
        """The same again. Raises Damaged."""
        found = _WHOLE.fullmatch(name)
        if found is None or digest_bytes(data) != found[1]:
            raise Damaged(f"{name} is not what was written")
        try:
            fields = json.loads(data)
            leaves = {n: (str(t), tuple(shape)) for n, (t, shape) in fields["leaves"].items()}
            return cls(leaves, fields["stacked"], files_of(fields["files"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"{name} is of another release: {error!r}") from None

    def check(self, leaves: Leaves, stacked: str | None) -> None:
        """Raises Damaged unless it holds these leaves, of these shapes and types."""
        wrong = [
            name
            for name in sorted(self.leaves.keys() | leaves.keys())
            if self.leaves.get(name) != leaves.get(name)
        ]
        if wrong or self.stacked != stacked:
            raise Damaged(f"an inner state of another model: {', '.join(wrong[:5]) or stacked}")


def is_whole(name: str) -> bool:
    """Whether a file of that name makes a checkpoint complete."""
    return _WHOLE.fullmatch(name) is not None


def is_sequence(name: str) -> bool:
    """Whether a folder of that name is a checkpoint, complete or not."""
    return _SEQUENCE.fullmatch(name) is not None


def files_of(given: Mapping[str, Sequence[Any]]) -> dict[str, tuple[int, str]]:
    """Files as JSON has them. Raises ValueError or TypeError for what are none."""
    return {str(path): (int(size), str(digest)) for path, (size, digest) in given.items()}


def described(leaves: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Types and shapes of arrays by name."""
    return {name: (str(np.dtype(x.dtype)), tuple(x.shape)) for name, x in leaves.items()}


def share(files: Files, index: int, hosts: int) -> list[str]:
    """Those that this one of so many hosts checks: together they check each once, and all of them
    about as many bytes."""
    loads, found = [0] * hosts, list[str]()
    for path, (size, _) in sorted(files.items(), key=lambda item: (-item[1][0], item[0])):
        least = loads.index(min(loads))
        loads[least] += size
        if least == index:
            found.append(path)
    return found


# --------------------------------------------------------------------------------------------------
# What a host says of its part.


@dataclass(frozen=True, slots=True)
class Told:
    """`fault`: why it could not be done, or "". `files`: what this host has written."""

    fault: str = ""
    files: Files = field(default_factory=dict)

    def encoded(self) -> bytes:
        """As JSON, which `decoded` reads."""
        return json.dumps([self.fault, dict(self.files)]).encode()

    @classmethod
    def decoded(cls, data: Any) -> "Told":
        fault, files = json.loads(bytes(data))
        return cls(str(fault), files_of(files))


def fault_of(error: BaseException) -> str:
    """In a line. Of what Orbax wraps, the innermost words: those tell what happened.

    Of a long line the beginning and the end stay, which says why; between them are paths.
    """
    while isinstance(error.__cause__, Exception) and not isinstance(error, OSError | Damaged):
        error = error.__cause__
    text = str(error).strip().partition("\n")[0]
    for known in (" [os_error_code", " [tensorstore_spec"):
        text = text.partition(known)[0]
    if len(text) > TEXT_MAX:
        text = f"{text[: TEXT_MAX // 3]} ... {text[-TEXT_MAX * 2 // 3 + 5 :]}"
    return text or type(error).__name__


def faults_of(told: Mapping[int, Told], names: Mapping[int, str]) -> str:
    """Who could not do its part, and why; "" where all could. One that several hosts tell alike is
    told once."""
    by: dict[str, list[str]] = {}
    for index, one in sorted(told.items()):
        if one.fault:
            by.setdefault(one.fault, []).append(names.get(index, f"host {index}"))
    return "; ".join(f"{_listed(who)}: {fault}" for fault, who in by.items())


def _listed(who: Iterable[str]) -> str:
    some = list(who)
    return ", ".join(some) if len(some) < 4 else f"{some[0]}, {some[1]} and {len(some) - 2} more"


# --------------------------------------------------------------------------------------------------
# What a process does with what it holds of the moments.


class Written(Protocol):
    """Its part of a checkpoint, on its way."""

    def told(self) -> Told:
        """What became of it; waits for that."""


class ShardsHere(Protocol):
    """What this process needs of its place for them: see `sharded_io.Shards`."""

    def look(self, name: str, token: str) -> None: ...
    def keep(self, sequence: int, leaves: Mapping[str, jax.Array]) -> Written:
        """Copy this process's parts of these arrays, and begin to write them."""

    def restore(
        self,
        sequence: int,
        leaves: Mapping[str, jax.Array],
        lying: Mapping[str, Any],
        stacked: str | None,
    ) -> dict[str, jax.Array]:
        """The leaves of that checkpoint, like these, lying so. These are deleted before."""


def looked(shards: ShardsHere, order: plan.Look) -> Told:
    """Whether this process can use the place that process 0 sees."""
    try:
        shards.look(order.name, order.token)
    except Exception as error:  # also of a library that does without exceptions of its own
        return Told(fault_of(error))
    return Told()


def restored(trainer: Trainer, shards: ShardsHere, sequence: int) -> Told:
    """Take over what a checkpoint holds. If anything is wrong with it, the moments may be gone."""
    leaves = to_named(trainer.opt_state)
    lying = {name: leaf.sharding for name, leaf in leaves.items()}
    try:
        found = shards.restore(sequence, leaves, lying, trainer.program.model.stacked)
    except Exception as error:  # Orbax raises many kinds
        return Told(fault_of(error))
    trainer.opt_state = from_named(trainer.opt_state, found)
    return Told()


def anew(trainer: Trainer) -> None:
    """The moments that every learner begins with; a program of all processes."""
    for leaf in to_named(trainer.opt_state).values():
        leaf.delete()  # there may be no room for both
    trainer.opt_state = trainer.program.init_state(trainer.params)


@dataclass(frozen=True, slots=True)
class Promised:
    """What this process has to tell later: waited for by a thread of its own."""

    told: Callable[[], Told]

    def fetch(self) -> list[Any]:
        """As process 0 gets it."""
        return [np.frombuffer(self.told().encoded(), np.uint8)]
