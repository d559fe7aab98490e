"""The command that takes the weights out of a run."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from diloco_cli.api import Patience, connect
from diloco_cli.cluster import Where
from diloco_cli.commands.options import Json, anywhere, show
from diloco_cli.downloading import PATIENCE_S, Download, Target, listed
from diloco_cli.words import FAILED, INVALID, CliError, counted
from diloco_client import ApiError, Client, Unreachable
from diloco_shared.budget.terms import shown

app = typer.Typer()

# Between two looks at how far it is, and between two lines where there is no terminal, in seconds.
LOOK_S = 0.3
LINES_S = 10.0
# For other exports to end, in seconds: a run that has just ended exports by itself, and a small
# model takes seconds. Who waits for a large one may as well come back.
WAIT_S = 600.0
# The title of the answer that says so.
BUSY = "No export can begin now"


class DtypeChoice(StrEnum):
    """How values are written."""

    fp32 = "fp32"
    bf16 = "bf16"


@app.command()
@anywhere
def export(
    where: Where,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    to: Annotated[Path, typer.Option(help="Folder to make; an empty one will do.")],
    version: Annotated[
        int | None,
        typer.Option(min=0, help="Version of every fragment; the newest if left out."),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Number of a run-wide checkpoint, or FOLDER/NUMBER.")
    ] = "",
    dtype: Annotated[
        DtypeChoice, typer.Option(help="fp32 as it is published; bf16 takes half the bytes.")
    ] = DtypeChoice.fp32,
    as_json: Json = False,
) -> None:
    """Take the weights out of a run, while it goes on or afterwards."""
    if version is not None and checkpoint:
        raise CliError("give --version or --checkpoint, not both", INVALID)
    target = Target(to)
    wish = {"version": version, "checkpoint": checkpoint or None, "dtype": dtype.value}
    with connect(where) as client:
        made = downloaded(client, run, wish, target, quiet=as_json)
    show({**made, "folder": str(target.folder)}, as_json, lambda: _told(made, to))


def downloaded(
    client: Client, run: str, wish: dict[str, Any], target: Target, *, quiet: bool
) -> dict[str, Any]:
    """Have an export made, and fetch it into `target`; what the API says of it. Shows progress."""
    with _bar(quiet=quiet) as bar:
        made = _made(client, run, _begun(client, run, wish, target, bar), bar)
        files = listed(made)
        total, here = sum(file.bytes for file in files), 0
        bar("downloading", here, total)

        def moved(more: int) -> None:
            nonlocal here
            here += more
            bar("downloading", here, total)

        download = Download(client, run, str(made["id"]), target, moved)
        for file in files:
            download.file(file)
        target.take_place(files)
    return made


def fetched(
    client: Client,
    run: str,
    wish: dict[str, Any],
    target: Target,
    *,
    quiet: bool,
    goes_on: bool,
) -> None:
    """As `downloaded`, where nobody asked for an export: the coordinator's copy goes afterwards.
    It is a whole model, and would push out one that somebody did ask for.

    `goes_on`: of a download that is cut off the copy stays, as the same command needs it again.
    """
    try:
        export = str(downloaded(client, run, wish, target, quiet=quiet)["id"])
    except BaseException:  # Ctrl-C is one
        if not goes_on and (mark := target.begun()) is not None:
            _removed(client, run, str(mark["export"]))
        raise
    _removed(client, run, export)


def _removed(client: Client, run: str, export: str) -> None:
    """If it can be now; what the command was typed for does not depend on it."""
    with suppress(ApiError, Unreachable):
        client.delete_export(run, export)


def _begun(client: Client, run: str, wish: dict[str, Any], target: Target, bar: "Bar") -> str:
    """The export to download: one that an earlier attempt began, or a new one."""
    url = client.url
    before = target.begun()
    if before is not None and before | {"export": ""} == _mark(url, run, wish, ""):
        try:
            found = client.show_export(run, str(before["export"]))
            if found["state"] != "failed":
                return str(found["id"])
        except ApiError as error:
            if error.status != 404:
                raise
    begun = _asked(client, run, wish, bar)
    target.begin(_mark(url, run, wish, str(begun["id"])))
    return str(begun["id"])


def _asked(client: Client, run: str, wish: dict[str, Any], bar: "Bar") -> dict[str, Any]:
    """A new export; while others are being made, they are waited for."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            return client.export(run, **wish)
        except ApiError as error:
            if error.title != BUSY or time.monotonic() > until:
                raise
        bar("waiting", 0, 0)
        time.sleep(LOOK_S)


def _mark(url: str, run: str, wish: dict[str, Any], export: str) -> dict[str, Any]:
    return {"url": url, "run": run, "wish": wish, "export": export}


def _made(client: Client, run: str, export: str, bar: "Bar") -> dict[str, Any]:
    """The export once it is complete; a coordinator that is away for a moment is waited for."""
    patience = Patience(PATIENCE_S)
    while True:
        if (found := patience.ask(lambda: client.show_export(run, export))) is None:
            time.sleep(LOOK_S)
            continue
        if found["state"] == "complete":
            return found
        if found["state"] == "failed":
            raise CliError(f"the export failed: {found['reason']}", FAILED)
        progress = found["progress"] or {"stage": "starting", "bytes_done": 0, "bytes_total": 0}
        bar(progress["stage"], progress["bytes_done"], progress["bytes_total"])
        time.sleep(LOOK_S)


# --------------------------------------------------------------------------------------------------
# What people see.

Bar = Callable[[str, int, int], None]  # what is being done, bytes done, bytes in all
WORDS = {
    "waiting": "waits for another export to end",
    "starting": "the coordinator starts",
    "fetching": "the coordinator reads the run",
    "writing": "the coordinator writes files",
    "downloading": "downloading",
}


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Bar]:
    """On a terminal a bar; elsewhere a line at every stage, and now and then; or nothing."""
    console = Console(file=sys.stderr)
    if quiet:
        yield lambda stage, done, total: None
    elif console.is_terminal:
        with _progress(console) as progress:
            task = progress.add_task(WORDS["starting"], total=None)

            def drawn(stage: str, done: int, total: int) -> None:
                progress.update(task, description=WORDS[stage], completed=done, total=total or None)

            yield drawn
    else:
        yield Lines(lambda line: print(line, file=sys.stderr, flush=True), time.monotonic)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


class Lines:
    """Progress where there is no terminal."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.say = say
        self.clock = clock
        self.stage = ""
        self.said_at = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = self.clock()
        if stage == self.stage and now - self.said_at < LINES_S:
            return
        self.stage, self.said_at = stage, now
        of = f": {shown(done)} of {shown(total)}" if total else ""
        self.say(f"{WORDS[stage]}{of}")


def _told(made: dict[str, Any], to: Path) -> list[str]:
    versions = made["versions"]
    least, most = min(versions), max(versions)
    span = f"version {least}" if least == most else f"versions {least} to {most}"
    known = any(f["name"] == "config.json" for f in made["files"])
    weights = next(f["name"] for f in made["files"] if f["name"].endswith(".safetensors"))
    load = (
        f'it loads with transformers: AutoModelForCausalLM.from_pretrained("{to}")'
        if known
        else f'it loads with safetensors: safetensors.numpy.load_file("{to / weights}")'
    )
    return [
        f"{to}: the weights of {made['run']} at step {made['steps']} "
        f"({counted(len(versions), 'fragment')} at {span}), {made['asked']['dtype']}",
        *(f"  {f['name']}: {shown(f['bytes'])}, checked" for f in made["files"]),
        f"  {load}",
        f"  the coordinator keeps its copy until newer ones replace it: export {made['id']}",
    ]
