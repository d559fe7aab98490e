"""Which run-wide checkpoints are used or removed just now: none goes while a run begins with it.

A run's record says what it needs, and whoever removes a checkpoint asks the records first. Between
that question and the removal a record may be written. So each of the two requests refuses while the
other one is at work; nobody waits, since a removal may take minutes. It holds of one coordinator.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from diloco_coordinator.api.problems_io import Problem


class Uses:
    """Of one coordinator. As long as its requests under way are many."""

    def __init__(self) -> None:
        self._used: list[str] = []  # references
        self._removed: list[str] = []  # references, or the beginnings of several: FOLDER/

    @contextmanager
    def using(self, *refs: str) -> Iterator[None]:
        """From before checkpoints are looked for until the record says that they are needed; 409
        while one of them is removed. "" is none."""
        used = [ref for ref in refs if ref]
        for ref in used:
            if any(ref.startswith(place) for place in self._removed):
                text = f"{ref} is being removed: take another one"
                raise Problem(409, "The checkpoint is being removed", text)
        self._used += used
        try:
            yield
        finally:
            for ref in used:
                self._used.remove(ref)

    @contextmanager
    def removing(self, place: str) -> Iterator[None]:
        """From before it is asked who needs what begins so until it is gone; 409 while a run is
        begun with it."""
        if refs := sorted(ref for ref in self._used if ref.startswith(place)):
            text = (
                f"a run that needs {refs[0]} is being submitted, or is sent back to it: try again"
            )
            raise Problem(409, "A run needs it", text)
        self._removed.append(place)
        try:
            yield
        finally:
            self._removed.remove(place)
