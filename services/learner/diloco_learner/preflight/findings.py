"""What a check of a run finds, and in which order checks come. Light: needs no JAX.

A check is skipped where what it needs is wrong: one mistake is told once, and nothing large is
begun that cannot succeed.
"""

import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diloco_learner
import diloco_shared

# A message of somebody else's library may hold a whole program; nobody reads more than this.
TEXT_MAX = 2000

# Each check, and those whose results it needs. They come in this order.
_BEFORE_COMPILING = (
    "devices",
    "model",
    "device memory",
    "weights",
    "tokenizer",
    "corpus",
    "vocabulary",
    "sequences",
    "host memory",
    "disk",
)
NEEDS: Mapping[str, tuple[str, ...]] = {
    "devices": (),
    "model": ("devices",),
    "device memory": ("model",),
    "weights": (),
    "tokenizer": (),
    "corpus": ("tokenizer",),
    "vocabulary": ("corpus",),
    "sequences": ("corpus",),
    "host memory": ("model",),
    "disk": ("model",),
    "compile": _BEFORE_COMPILING,
    "step": ("compile",),
}
CHECKS = tuple(NEEDS)
# In the place of all of them, where nothing can be checked for want of it.
SOFTWARE = "software"


@dataclass(frozen=True, slots=True)
class Finding:
    """Of one check. `ok`: it was made, and nothing is wrong. `figures`: by name, units in it."""

    name: str
    ok: bool
    text: str
    remedy: str = ""
    skipped: bool = False
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """In one word."""
        return "ok" if self.ok else "skipped" if self.skipped else "WRONG"

    def view(self) -> dict[str, Any]:
        """JSON-ready; `read` is its inverse."""
        return {
            "name": self.name,
            "ok": self.ok,
            "text": self.text,
            "remedy": self.remedy,
            "skipped": self.skipped,
            "figures": dict(self.figures),
        }


def read(view: Mapping[str, Any]) -> Finding:
    """What `Finding.view` made. Raises KeyError, TypeError for anything else."""
    text, remedy = str(view["text"])[:TEXT_MAX], str(view["remedy"])[:TEXT_MAX]
    ok, skipped, figures = bool(view["ok"]), bool(view["skipped"]), dict(view["figures"])
    return Finding(str(view["name"]), ok, text, remedy, skipped, figures)


class Causes:
    """Which checks went wrong so far, and which later ones that concerns."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, ...]] = {}

    def take(self, finding: Finding) -> None:
        """A check was made."""
        if not finding.ok:
            self._of[finding.name] = (finding.name,)

    def skip(self, name: str) -> Finding | None:
        """The finding in the place of this check, if something that it needs is wrong."""
        found = (cause for need in NEEDS[name] for cause in self._of.get(need, ()))
        causes = tuple(dict.fromkeys(found))
        if not causes:
            return None
        self._of[name] = causes
        return skipped(name, causes)


def wrong(name: str, text: str, remedy: str) -> Finding:
    """A check that found something wrong."""
    return Finding(name, False, text[:TEXT_MAX], remedy[:TEXT_MAX])


def untried(name: str, text: str) -> Finding:
    """Of a check that cannot be made here, and of which nothing is known to be wrong."""
    return Finding(name, False, f"not tried: {text}"[:TEXT_MAX], skipped=True)


def skipped(name: str, bad: Sequence[str]) -> Finding:
    """A check that could not be made, since those before it are `bad`."""
    return Finding(name, False, f"needs what is not sound: {', '.join(bad)}", skipped=True)


class Wrong(Exception):
    """Of a check that knows by itself what is wrong, and what to do."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(text)
        self.text, self.remedy = text, remedy


class NotHere(Exception):
    """Of a check that this machine alone cannot make; the text says why."""


# --------------------------------------------------------------------------------------------------
# What an exception says, and where it was raised, in one line for whoever wrote the code.

# Of chains of causes: longer ones are loops.
CAUSES_MAX = 16
_OURS = tuple(str(Path(p)) for m in (diloco_learner, diloco_shared) for p in m.__path__)
_INSTALLED = tuple({p for n, p in sysconfig.get_paths().items() if n.endswith(("lib", "stdlib"))})


def told(error: BaseException) -> str:
    """Type, message, and the file and line of the user's own code nearest to where it was raised.

    What this project says of a wrong setting or file needs no type.
    """
    said = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    ours = bool(frames) and frames[-1].filename.startswith(_OURS)
    foreseen = ours and isinstance(error, ValueError | OSError)
    text = said if foreseen else f"{type(error).__name__}: {said}"
    place = _place(origin(error), foreseen=foreseen)
    return f"{text} (raised at {place})" if place else text


def origin(error: BaseException) -> BaseException:
    """The first of a chain: an error that was put into other words has the line of its cause."""
    for _ in range(CAUSES_MAX):
        if error.__cause__ is None:
            break
        error = error.__cause__
    return error


def _place(error: BaseException, *, foreseen: bool) -> str:
    """FILE:LINE of the innermost frame of the user's own files, if there is one.

    If there is none, that of the innermost of all, unless it is this project's own.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    others = [f for f in frames if not f.filename.startswith((*_OURS, "<"))]
    own = [f for f in others if not f.filename.startswith(_INSTALLED)]
    found = own or ([] if foreseen else others or frames)
    return f"{found[-1].filename}:{found[-1].lineno}" if found else ""
