"""What an exception says, and where it was raised, in one line for whoever wrote the code."""

import sysconfig
import traceback
from pathlib import Path

import diloco_learner
import diloco_shared

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
