"""`python -m diloco_learner.exporting`: one export, told line by line on standard output.

The bus and its token come from the environment, as for every process (DILOCO_NATS_URL, …). Exit
status 0 when the folder is there, 1 when it cannot be made, 2 for a wrong call.
"""

import argparse
import asyncio
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
from pydantic import ValidationError

from diloco_learner.exporting.checkpoint_io import Checkpointed
from diloco_learner.exporting.choosing import NotPublished
from diloco_learner.exporting.making_io import BytesMoved, Companions, Order, ParameterSource, make
from diloco_learner.exporting.observing_io import PublishedView, UnreadableRun
from diloco_learner.exporting.writing_io import CannotWrite
from diloco_learner.settings import Settings
from diloco_shared import ambient
from diloco_shared.bus.port import Bus, BusError
from diloco_shared.bus.stored_records import record_at
from diloco_shared.hf.tokenizer import (
    GENERATION,
    SPM_ALONE,
    ends_of_answers,
    files_of,
    generation_config,
    special_tokens,
    tokenizer_of,
)
from diloco_shared.process.logs import configure
from diloco_shared.process.serving import connected_for_data
from diloco_shared.process.settings import said_of
from diloco_shared.process.stopping import die_with, until_stopped
from diloco_shared.protocol import subjects
from diloco_shared.protocol.exports import ExportDone, ExportFailed, ExportMoved
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import WireError
from diloco_shared.reach.local import Root
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import shape_of

log = structlog.get_logger()

# Between two lines about progress, in seconds: more often nobody looks.
TELL_S = 0.2
_TOKEN = re.compile(r"([a-z_]{1,40})=(\d{1,9})")
FORESEEN = (NotPublished, UnreadableRun, CannotWrite, BusError, WireError, ValidationError, OSError)


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line, checked: a wrong one ends the process with status 2."""
    parser = argparse.ArgumentParser(prog="diloco_learner.exporting", description=__doc__)
    parser.add_argument("run", help="name of the run")
    parser.add_argument("--run-id", default="", help="its id, where an earlier run had the name")
    parser.add_argument("--to", type=Path, required=True, help="folder to make, or an empty one")
    parser.add_argument("--version", type=int, help="version of every fragment; else the newest")
    parser.add_argument("--checkpoint", default="", help="FOLDER/NUMBER, or an address of its own")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--file", type=Path, action="append", default=[], help="to copy beside it")
    parser.add_argument("--token", action="append", default=[], help="special token: NAME=ID")
    parser.add_argument("--owner", type=int, help="process that it is for, and ends with")
    found = parser.parse_args(given)
    if found.version is not None and found.checkpoint:
        parser.error("give --version or --checkpoint, not both")
    wrong = next((text for text in found.token if not _TOKEN.fullmatch(text)), None)
    if wrong is not None:
        parser.error(f"--token {wrong}: give NAME=ID, as in eos_token_id=0")
    return found


Line = ExportMoved | ExportDone | ExportFailed
# To the hub, for as long as the context lasts.
Connect = Callable[[], AbstractAsyncContextManager[Bus]]


class _Teller:
    """Progress, for whoever started this process; not more often than anybody looks."""

    def __init__(self, say: Callable[[Line], None]) -> None:
        self.say = say
        self.told_at = float("-inf")

    def moved(self, line: ExportMoved) -> None:
        now = ambient.monotonic()
        if now - self.told_at >= TELL_S or line.done == line.total:
            self.told_at = now
            self.say(line)


def say(line: Line) -> None:
    """On standard output, now: the pipe has a buffer, and nobody reads what is in it."""
    print(line.model_dump_json(), flush=True)


async def spec_of(bus: Bus, run: str, run_id: str) -> RunSpec:
    """What the run was submitted with. Raises UnreadableRun where there is no such run."""
    found = await record_at(bus, subjects.RUNS, run, RunRecord)
    spec = RunSpec.model_validate(found.record.spec) if found else None
    if spec is None or (run_id and spec.id != run_id):
        raise UnreadableRun(f"there is no run {run[:63]!r}, or another one has its name by now")
    return spec


def of_tokenizer(spec: RunSpec, root: Root) -> Companions:
    """The files of the run's tokenizer; paths are looked for in `root`.

    Nothing, and a line in the log, where its files are not on this machine: the weights are worth
    having without them.
    """
    try:
        rows = None if spec.model.factory is not None else shape_of(spec.model).vocabulary
        tokenizer = tokenizer_of(spec.data, root, rows)
    except ValueError as error:
        log.warning("without tokenizer", reason=str(error))
        return Companions(tokens=special_tokens(None))
    contents = files_of(tokenizer)
    if SPM_ALONE in contents:
        log.warning("others cannot read the tokenizer", file=SPM_ALONE)
    try:
        ends = ends_of_answers(spec.data, root)
    except ValueError as error:
        log.warning("without the end of answers", reason=str(error))
        ends = ()
    return Companions(contents=contents, tokens=special_tokens(tokenizer, ends))


def as_asked(found: Companions, wanted: argparse.Namespace) -> Companions:
    """With the files and the special tokens that the command line names."""
    given = (text.partition("=") for text in wanted.token)
    tokens = {**found.tokens, **{name: int(number) for name, _, number in given}}
    ends, contents = generation_config(tokens), dict(found.contents)
    if ends is not None:
        contents[GENERATION] = ends
    return replace(found, files=tuple(wanted.file), contents=contents, tokens=tokens)


async def export(
    settings: Settings,
    wanted: argparse.Namespace,
    connect: Connect,
    say: Callable[[Line], None],
    published: type[PublishedView] = PublishedView,
) -> None:
    """Make it, and say what became of it. Raises one of FORESEEN, after it has said so."""
    try:
        await _made(settings, wanted, connect, say, published)
    except FORESEEN as error:
        say(ExportFailed(reason=(str(error) or type(error).__name__)[:500]))
        raise
    say(ExportDone())


async def _made(
    settings: Settings,
    wanted: argparse.Namespace,
    connect: Connect,
    say: Callable[[Line], None],
    published: type[PublishedView],
) -> None:
    def companions(spec: RunSpec) -> Companions:
        return as_asked(of_tokenizer(spec, settings.reach.data), wanted)

    order = Order(wanted.to, wanted.dtype, wanted.checkpoint, companions)
    progress = BytesMoved(_Teller(say).moved)
    source: ParameterSource
    if wanted.checkpoint:
        root, places = settings.checkpoint_root, settings.checkpoint_places
        source = Checkpointed(wanted.checkpoint, root, progress.fetching, places)
        await make(source, order, progress)
        return
    async with connect() as bus:
        spec = await spec_of(bus, wanted.run, wanted.run_id)
        source = published(bus, spec, wanted.version, progress.fetching)
        await make(source, order, progress)


def main() -> None:
    """Make it, and say what became of it."""
    wanted = arguments(sys.argv[1:])
    if wanted.owner is not None:
        die_with(wanted.owner)
    try:
        settings = Settings()
        configure(settings.log, json=settings.log_format == "json")
    except ValueError as error:
        sys.exit(f"diloco_learner.exporting: {said_of(error)}")
    try:
        connect = partial(connected_for_data, settings, f"export-{wanted.run}")
        work = export(settings, wanted, connect, say)
        asyncio.run(until_stopped(work))
    except FORESEEN:
        sys.exit(1)


if __name__ == "__main__":
    main()
