"""Commands about runs."""

import re
from collections.abc import Iterator
from datetime import date, time
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_cli.api import Patience, connect, newest_rounds, only_run, rounds_or_why
from diloco_cli.cluster import Where
from diloco_cli.commands.options import DataRoot, Json, Run, anywhere, first_of, show
from diloco_cli.from_run import names_a_run, put_weights
from diloco_cli.meanwhile import meanwhile
from diloco_cli.run_file import fill_in, read_run
from diloco_cli.view import run_lines, state_line, unread_lines
from diloco_cli.words import (
    CONFLICT,
    INVALID,
    NO_CLUSTER,
    CliError,
    became,
    counted,
    reason_of,
    why,
)
from diloco_client import ApiError, Client
from diloco_shared.protocol.subjects import ID_PATTERN
from diloco_shared.protocol.telling import readable
from diloco_shared.spec.run import OF_RUN

app = typer.Typer()

# The rounds of a long run are read for minutes. What was read is not thrown away while a
# coordinator, or its message server, is started anew: that takes less than so many seconds. One
# page may be waited for longer than for a minute, and is then asked for once more.
PATIENCE_S = 150.0
# The title of the answer that says so.
NO_RUN = "No such run"
# Reason codes of a run that is there for nobody: its submission, or its removal, is under way, or
# was cut off half way.
_SUBMITTING, _DELETING = "submitting", "deleting"


@app.command()
@anywhere
def submit(
    where: Where,
    file: Annotated[Path, typer.Argument(help="run.toml")],
    checkpoint: Annotated[
        str,
        typer.Option("--from", help="A checkpoint to begin with: FOLDER/NUMBER, or its address."),
    ] = "",
    from_run: Annotated[
        str,
        typer.Option(help="A run whose weights this one begins from: NAME, or NAME@VERSION."),
    ] = "",
    data_root: DataRoot = ".",
    if_absent: Annotated[bool, typer.Option(help="No error if the run exists already.")] = False,
    as_json: Json = False,
) -> None:
    """Submit a run."""
    spec, root = read_run(file), first_of(data_root)
    if faults := [*_unsendable(spec, "")]:
        raise CliError("; ".join(faults), INVALID)
    if from_run:
        _begin_from(spec, from_run)
    with connect(where) as client:
        # A run that exists needs none of the folders any more that it began from.
        run = _there(client, spec) if if_absent else None
        if run is None:
            _fill(spec, root)
            if names_a_run(spec):
                _put(client, spec, root, quiet=as_json)
            run = _created(client, spec, checkpoint, if_absent=if_absent)
    show(run, as_json, lambda: [state_line(run), f"look on: diloco watch {run['name']}"])


def _created(
    client: Client, spec: dict[str, Any], checkpoint: str, *, if_absent: bool
) -> dict[str, Any]:
    try:
        return client.create_run_from(checkpoint, spec) if checkpoint else client.create_run(spec)
    except ApiError as error:
        if not (if_absent and error.status == 409):  # another command was as quick
            raise
        run = _of_this_name(client, spec)
        if run is None or _half(run):
            raise  # it is about something else, or nobody knows yet whether it will be there
        return run


def _of_this_name(client: Client, spec: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return client.run(str(spec["name"]))
    except ApiError as error:
        if error.status != 404:
            raise
        return None


def _half(run: dict[str, Any]) -> str:
    """Whether it is there for nobody, and why: one of the codes above. "" for any other run."""
    codes = run.get("reason_codes", [])  # a coordinator before 0.3 says none
    return codes[0] if codes in ([_SUBMITTING], [_DELETING]) else ""


def _unsendable(value: Any, path: str) -> Iterator[str]:
    """Values of TOML that JSON has no form for, each with what to write instead."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _unsendable(each, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _unsendable(each, f"{path}.{index}")
    elif isinstance(value, date | time):
        kind = "time" if isinstance(value, time) else "date"
        yield f"{path}: is a {kind}: put it in quotes"
    elif isinstance(value, float) and not isfinite(value):
        yield f"{path}: is {value}: give a number that is finite"


def _fill(spec: dict[str, Any], root: Path) -> None:
    if faults := fill_in(spec, root):
        raise CliError("; ".join(f"{f.path}: {f.message}" for f in faults), INVALID)


def _put(client: Client, spec: dict[str, Any], root: Path, *, quiet: bool) -> None:
    """Download the weights of the run that is named, and look at what lies beside them. A fault
    says where they are: the same command would download the whole model once more."""
    put_weights(client, spec, root, quiet=quiet)
    weights = spec["model"]["weights"]
    try:
        _fill(spec, root)
    except CliError as error:
        text = (
            f"{error}. The weights of the run are downloaded: set model.weights = '{weights}' in "
            "the file (without --from-run), so that it is not done again"
        )
        raise CliError(text, error.status) from None


def _there(client: Client, spec: dict[str, Any]) -> dict[str, Any] | None:
    """The run of this name, if there is one. Half a submission is none: another one takes it up.
    CliError for a run that is being deleted."""
    name = spec.get("name")
    if not isinstance(name, str) or not re.fullmatch(ID_PATTERN, name):
        return None  # whoever checks the tables says so
    try:
        run = client.run(name)
    except ApiError as error:
        if error.status == 404:
            return None
        raise
    if (half := _half(run)) == _DELETING:
        text = f"run {name} is there, and is no run to go on with: {run['reason']}"
        raise CliError(text, CONFLICT)
    return None if half else run


def _begin_from(spec: dict[str, Any], run: str) -> None:
    """As if the file read model.weights = "run:NAME"."""
    model = spec.setdefault("model", {})
    if not isinstance(model, dict):
        raise CliError("[model] must be a table", INVALID)
    if model.get("weights"):
        text = f"the file names model.weights ({model['weights']}): leave that or --from-run out"
        raise CliError(text, INVALID)
    model["weights"] = f"{OF_RUN}{run}"


@app.command()
@anywhere
def runs(where: Where, as_json: Json = False) -> None:
    """Every run."""
    with connect(where) as client:
        found = client.runs()
    show(found, as_json, lambda: [state_line(r) for r in found] or ["no runs"])


@app.command()
@anywhere
def status(where: Where, run: Run = "", as_json: Json = False) -> None:
    """Where a run stands."""
    with connect(where) as client:
        found = only_run(client, run)
        evaluations = client.metrics(found["name"])["evaluations"]
        last, unread = rounds_or_why(lambda: newest_rounds(client, found, 1))

    def lines() -> list[str]:
        newest = last[-1] if last else None
        return [*run_lines(found, evaluations, newest), *unread_lines(unread)]

    show(found, as_json, lines)


@app.command()
@anywhere
def watch(where: Where, run: Run = "", as_json: Json = False) -> None:
    """Look on until the run is over; with --json one line per change."""
    from diloco_cli.live import follow

    with connect(where) as client:
        follow(client, only_run(client, run)["name"], as_json=as_json)


def _verb(name: str, text: str, then: str) -> None:
    """`pause`, `resume` and `stop` are one command each, alike but for the verb. `then`: what
    follows from it."""

    def command(where: Where, run: Run = "", as_json: Json = False) -> None:
        with connect(where) as client:
            changed = getattr(client, name)(only_run(client, run)["name"])
        show(changed, as_json, lambda: [f"run {changed['name']}: {then}"])

    command.__doc__ = text
    app.command(name)(anywhere(command))


_verb("pause", "Hold every learner at a step boundary.", "every learner rests after its step")
_verb("resume", "Go on after a pause.", "the learners go on")
_verb("stop", "Merge once more, evaluate, and end the run.", "it merges once more, and ends")


@app.command()
@anywhere
def quorum(
    where: Where,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    learners: Annotated[int, typer.Argument(min=1, help="How many contributions a merge needs.")],
    as_json: Json = False,
) -> None:
    """Change the quorum of a live run."""
    with connect(where) as client:
        changed = client.set_quorum(run, learners)
    told = [f"run {run}: a merge needs {counted(changed['quorum'], 'learner')} now (the quorum)"]
    told += [changed["consequence"]] if changed.get("consequence") else []
    show(changed, as_json, lambda: told)


@app.command("begin-again")
@anywhere
def begin_again(
    where: Where,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    as_json: Json = False,
) -> None:
    """Go on from the published parameters, when every syncer has lost the run's state."""
    with connect(where) as client:
        begun = client.begin_again(run)
    show(begun, as_json, lambda: [f"run {run} begins a new epoch from its published parameters"])


@app.command()
@anywhere
def delete(
    where: Where,
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    if_present: Annotated[
        bool, typer.Option("--if-present", help="No error if there is no such run.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove a run that is over, with everything the bus keeps of it."""
    doing, there = "waits until everything of it is removed", True
    with connect(where) as client, meanwhile(doing, quiet=as_json):
        try:
            client.delete_run(run)
        except ApiError as error:
            # By its title: whatever answers at a wrong address knows no such page.
            if not (if_present and error.title == NO_RUN):
                raise
            there = False
    gone = f"there is no run {run}: nothing is left to delete"
    said = f"run {run} is deleted" if there else gone
    show({"run": run, "deleted": there}, as_json, lambda: [said])


@app.command()
@anywhere
def rounds(
    where: Where,
    run: Run = "",
    newest: Annotated[int, typer.Option(min=1, help="How many.")] = 10,
    as_json: Json = False,
) -> None:
    """Why each learner was merged or not."""
    with connect(where) as client:
        found = newest_rounds(client, only_run(client, run), newest)
    lines = [line for r in found for line in _round_lines(r)]
    show(found, as_json, lambda: lines or ["no round has closed yet"])


def _round_lines(r: dict[str, Any]) -> list[str]:
    return [
        f"round {r['round']} of fragment {r['fragment']} was {r['outcome']}: "
        f"{reason_of(r['reason'])}",
        f"  {reason_of(r['quorum_reason'], past=True)}",
        f"  it waited {r['quorum_s']:.2f} s until enough were ready and {r['grace_s']:.2f} s more "
        f"for late ones (grace); fetching and merging took {r['sync_s']:.2f} s",
        *(f"  {became(v)}" for v in r["verdicts"]),
    ]


@app.command()
@anywhere
def report(
    where: Where,
    run: Run = "",
    html: Annotated[Path | None, typer.Option(help="Write a page with charts there too.")] = None,
    as_json: Json = False,
) -> None:
    """What a run achieved, in figures."""
    from diloco_cli.report import report as figures_of
    from diloco_cli.report import versions, without_rounds
    from diloco_cli.report_lines import report_lines
    from diloco_cli.tally import Tally

    with connect(where) as client, meanwhile("reads every round of the run", quiet=as_json):
        found = only_run(client, run)
        events = readable(client.events(found["name"]))
        insist = Patience(PATIENCE_S).insist
        rounds = client.each_round(found["name"], further=insist) if found["status"] else iter(())
        tallied = partial(Tally.of, found, rounds, events)
        read, unread = rounds_or_why(lambda: [tallied()], damaged=html is None)
    if unread and html is not None:
        text = f"{html} is not written, since the rounds cannot be read: {unread.why}"
        raise CliError(text, NO_CLUSTER)
    tally = read[0] if read else Tally(found, events)
    figures = figures_of(found, tally, events)
    figures |= without_rounds(found) if unread else {}
    figures |= {"command": f"diloco report {found['name']}", **versions()}
    written = []
    if html is not None:
        from diloco_cli.page import page
        from diloco_shared.durable import replace

        try:
            _no_other(html)
            replace(html, page(figures, found, tally, events))
        except OSError as error:
            raise CliError(f"{html} cannot be written: {why(error)}") from None
        written = [f"page with charts: {html}"]
    show(figures, as_json, lambda: [*report_lines(figures), *unread_lines(unread), *written])


def _no_other(html: Path) -> None:
    """CliError for a file that is no page: it may be somebody's work."""
    if not html.exists():
        return
    with html.open("rb") as file:
        begins = file.read(200).lstrip().lower()
    if begins and not begins.startswith((b"<!doctype html", b"<html")):
        raise CliError(f"{html} is there, and is no page: name another file, or remove it", INVALID)
