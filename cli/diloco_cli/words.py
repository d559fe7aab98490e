"""What the command says: errors with an exit status, and words for what is meant by figures."""

import re
from typing import Any

# Exit statuses, so that scripts need not read sentences. 2 is the parser's: wrong usage.
FAILED = 1
NO_CLUSTER = 3
REFUSED = 4
UNKNOWN = 5
INVALID = 6
CONFLICT = 7
INTERRUPTED = 130


class CliError(Exception):
    """Shown without a traceback; the process ends with `status`."""

    def __init__(self, message: str, status: int = FAILED) -> None:
        super().__init__(message)
        self.status = status


# --------------------------------------------------------------------------------------------------
# Numbers and errors as people say them; sizes are `diloco_shared.budget.terms.shown`.


def counted(number: int, what: str) -> str:
    """1 round, 2 rounds."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# What a terminal takes for an order, or for another direction of writing. Names and texts of sites
# come here as they were sent. And halves of characters, which no stream takes: bytes of a name that
# are no UTF-8 come as such.
_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """A text for a terminal: lines and tabs stay, and what no terminal shows is written out."""
    return _ORDERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def why(error: Exception) -> str:
    """What the system says of a file, without number and path, which stand beside it."""
    said = error.strerror if isinstance(error, OSError) else None
    return said.lower() if said else str(error)


# What syncers say in few words, which records and answers keep, as people say it.
_MERGED = re.compile(r"^merged (\d+) contributions?")
_SKIPPED = re.compile(r"(\d+) contributions?, (\d+) needed")
_READY = re.compile(r"(\d+) of (\d+) ready, (\d+) needed")
_TRAIN = re.compile(r"\((\d+) train, (\d+) needed\)")
_STEPS = re.compile(r" has (\d+ of \d+ steps)")


def reason_of(said: str, *, past: bool = False) -> str:
    """A syncer's reason in words; one that is none of the usual ones stays as it is.

    `past`: of a round that is over.
    """
    said = _MERGED.sub(lambda m: f"it merged {counted(int(m[1]), 'contribution')}", said)
    needs = "and a merge needs"
    said = _SKIPPED.sub(
        lambda m: f"it had {counted(int(m[1]), 'contribution')}, {needs} {m[2]}", said
    )
    said = _TRAIN.sub(rf"(\1 train, {needs} \2)", said)
    said = _STEPS.sub(r" had \1" if past else r" has \1", said)

    def ready(m: re.Match[str]) -> str:
        be = ("was" if past else "is") if m[2] == "1" else ("were" if past else "are")
        return f"{m[1]} of {counted(int(m[2]), 'learner')} {be} ready, {needs} {m[3]}"

    return _READY.sub(ready, said)


# What became of a learner in a round, for people: it had taken its steps, and so was "ready".
BECAME = {
    "merged": "was merged",
    "missed": "did not come in time",
    "refused": "was refused",
    "ineligible": "was not asked",
}


def became(verdict: dict[str, Any]) -> str:
    """One learner's part in a round, in words."""
    return f"{verdict['learner']} {BECAME[verdict['outcome']]}: {verdict['reason']}"
