"""`python -m diloco_learner.sampling FOLDER`: one sample, told line by line on standard output.

What to write comes as JSON on standard input. Exit status 0 when all is written, 1 when it cannot
be, 2 for a wrong call. Nothing is written that was not asked for: no prompt, no end of a line.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from diloco_shared.process.stopping import die_with
from diloco_shared.protocol.samples import (
    LINE_BYTES_MAX,
    SampleAsked,
    SampleBegun,
    SampleDone,
    SampleFailed,
    SampleLine,
    SampleText,
)


def _arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="diloco_learner.sampling", description=__doc__)
    parser.add_argument("folder", type=Path, help="of a model, with its tokenizer")
    parser.add_argument("--owner", type=int, help="process that it is for, and ends with")
    return parser.parse_args(given)


def lines_of(folder: Path, asked: SampleAsked) -> Iterator[SampleLine]:
    """What is said of one sample. A model that cannot write, or not this, is the last line."""
    try:
        # Here, since it takes a while and may not be installed.
        from diloco_learner.models.decoding import Sampling, writer

        model = writer(folder, Sampling(asked.temperature))
        begin = model.answer if asked.chat else model.text
        pieces = begin(asked.prompt, asked.tokens, asked.seed)
        yield SampleBegun()
        number = 0
        for text in pieces:
            number += 1
            yield SampleText(text=text)
        yield SampleDone(pieces=number)
    # The last kind is jax's: its device has no memory left, for one.
    except (ImportError, ValueError, OSError, MemoryError, RuntimeError) as error:
        yield SampleFailed(reason=(str(error) or type(error).__name__)[:500])


def main() -> None:
    """Write it, and say what became of it."""
    wanted = _arguments(sys.argv[1:])
    if wanted.owner is not None:
        die_with(wanted.owner)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        asked = SampleAsked.model_validate_json(sys.stdin.buffer.read(LINE_BYTES_MAX))
    except ValidationError as error:
        sys.exit(f"diloco_learner.sampling: {error}")
    last: SampleLine | None = None
    for last in lines_of(wanted.folder, asked):
        # Now: the pipe has a buffer, and nobody reads what is in it.
        print(last.model_dump_json(), flush=True)
    sys.exit(0 if isinstance(last, SampleDone) else 1)


if __name__ == "__main__":
    main()
