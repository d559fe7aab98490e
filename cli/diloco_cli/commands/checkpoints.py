"""Commands about run-wide checkpoints."""

import re
import time
from typing import Annotated, Any

import typer

from diloco_cli.api import Patience, connect
from diloco_cli.cluster import Where
from diloco_cli.commands.options import Json, anywhere, show
from diloco_cli.meanwhile import meanwhile
from diloco_cli.view import state_line
from diloco_cli.words import FAILED, INVALID, CliError
from diloco_client import Client

app = typer.Typer()
checkpoint = typer.Typer(
    no_args_is_help=True, help="A whole run at one instant: make, list, show, restore, delete."
)
app.add_typer(checkpoint, name="checkpoint")

Name = Annotated[str, typer.Argument(help="Name of the run.")]
Number = Annotated[int, typer.Argument(min=1, help="Number of the checkpoint.")]
# Between two looks at whether it is done, in seconds.
LOOK_S = 0.3
# While the run's status does not say that it does what is waited for. A leading syncer says so once
# a second, gives up by itself what takes too long, and says that as well; another one that takes
# over needs seconds.
WAIT_S = 1200.0
# What the status says while a checkpoint is loaded; where that failed, ': ' and the fault follow.
RESTORING = re.compile(r"\brestoring [^\s;]+(?=;|$)")
# Events travel apart from the status, and may come a little later.
EVENT_S = 5.0
OVER = ("finished", "stopped")
# A coordinator that is restarted, or a message server, is back long before.
PATIENCE_S = 120.0


@checkpoint.command()
@anywhere
def create(where: Where, run: Name, as_json: Json = False) -> None:
    """Make a checkpoint of a live run, and wait until it is complete."""
    with connect(where) as client:
        begun = client.checkpoint(run)
        number = int(begun["number"])
        with meanwhile(f"waits until checkpoint {number} is complete", quiet=as_json):
            made = _made(client, run, number)
    show(made, as_json, lambda: [_line(made)])


def _made(client: Client, run: str, number: int) -> dict[str, Any]:
    """The checkpoint once it is complete; CliError says why it never will be."""
    until, patience = time.monotonic() + WAIT_S, Patience(PATIENCE_S)
    while time.monotonic() < until:
        if (found := patience.ask(lambda: client.run(run))) is None:
            time.sleep(LOOK_S)
            continue
        status = found["status"] or {}
        state = status.get("checkpoint_state", "")
        newest = int(status.get("checkpoint", 0))
        making = newest == number and state == "making"
        if making and _heard(found):
            until = time.monotonic() + WAIT_S
        if newest == number and state == "failed":
            raise CliError(f"checkpoint {number} failed: {status['checkpoint_reason']}", FAILED)
        if newest > number or (newest == number and state == "complete"):
            made = patience.ask(lambda: client.show_checkpoint(run, number))
            if made is not None:
                return made
        if found["state"] in OVER and not making:
            raise CliError(f"run {run!r} was over before checkpoint {number} was made", FAILED)
        time.sleep(LOOK_S)
    raise CliError(
        f"checkpoint {number} is not complete, and for {WAIT_S:.0f} s nothing said that it is "
        f"being made. It may still be made: 'diloco checkpoint list {run}' shows it then, and "
        f"'diloco checkpoint delete {run} {number}' removes it",
        FAILED,
    )


def _heard(run: dict[str, Any]) -> bool:
    """Whether its status is its leaders' word of now."""
    return run["state"] != "leaderless" and "hub-away" not in run.get("reason_codes", ())


def _restoring(run: dict[str, Any]) -> bool:
    """Whether its leader is about to go back."""
    reason = (run["status"] or {}).get("reason", "")
    return _heard(run) and RESTORING.search(reason) is not None


@checkpoint.command("list")
@anywhere
def list_(
    where: Where,
    run: Annotated[
        str, typer.Argument(help="Name of the run; all, of deleted runs too, if left out.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Complete checkpoints, oldest first, those that are damaged, and tapes of deleted runs."""
    with connect(where) as client, meanwhile("reads what is kept of them", quiet=as_json):
        listed = client.all_checkpoints(run)
    found, damaged = listed["checkpoints"], listed["damaged"]
    lines = [*map(_line, found), *map(_damaged_line, damaged), *map(_tape_line, listed["tapes"])]
    show(found, as_json, lambda: lines or ["no checkpoints"])


@checkpoint.command("show")
@anywhere
def show_(where: Where, run: Name, number: Number, as_json: Json = False) -> None:
    """What a checkpoint holds."""
    with connect(where) as client:
        found = client.show_checkpoint(run, number)
    show(found, as_json, lambda: [_line(found), *_details(found)])


@checkpoint.command()
@anywhere
def restore(
    where: Where,
    run: Name,
    number: Number,
    as_run: Annotated[
        str, typer.Option("--as", help="Begin a new run of this name; the old one is left alone.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Take a live run back to a checkpoint, or begin a new run with it."""
    with connect(where) as client:
        before = [] if as_run else client.events(run)
        since = int(before[-1]["seq"]) if before else 0
        wish = client.restore(run, number, as_run=as_run)
        name, serial = str(wish["run"]), int(wish["serial"])
        with meanwhile("waits until the run has gone back", quiet=as_json):
            found = _restored(client, name, serial, since=since, wait=not as_run)
    show(found, as_json, lambda: [state_line(found)])


def _restored(client: Client, run: str, serial: int, *, since: int, wait: bool) -> dict[str, Any]:
    """The run once it has gone back; a new one waits for its members, and so is not waited for.

    `since`: number of the newest event before the wish was made. CliError says why it has not.
    """
    until, patience = time.monotonic() + WAIT_S, Patience(PATIENCE_S)
    found = client.run(run)
    while wait:
        if _restores(found) >= serial:
            _check_gone_back(client, found, serial, since)
            break
        if found["state"] in OVER:
            raise CliError(f"run {run!r} was over before it went back to the checkpoint", FAILED)
        if _restoring(found):
            until = time.monotonic() + WAIT_S
        if time.monotonic() >= until:
            raise CliError(
                f"run {run!r} has not gone back, and for {WAIT_S:.0f} s nothing said that it is "
                f"about to. It may still go back: 'diloco status {run}' and 'diloco events {run}' "
                f"tell. 'diloco stop {run}' ends it before it does",
                FAILED,
            )
        time.sleep(LOOK_S)
        found = patience.ask(lambda: client.run(run)) or found
    return found


def _restores(run: dict[str, Any]) -> int:
    """Serial of the newest wish that is fulfilled or given up."""
    return int((run["status"] or {}).get("restores", 0))


def _check_gone_back(client: Client, run: dict[str, Any], serial: int, since: int) -> None:
    """CliError unless every shard tells that it went back: the status alone does not tell whether
    this wish was fulfilled or given up. `since`: number of the newest event before it."""
    name, shards = run["name"], _shards(run)
    until, patience = time.monotonic() + EVENT_S, Patience(PATIENCE_S)
    while True:
        # Only that all have gone back is the last word: a leader that failed may have died before
        # the wish was done with, and the next one goes back.
        told = patience.ask(lambda: _told(client, name))
        last = _last(told or [], serial)
        done = {shard for shard, event in last.items() if event["kind"] == "restored"}
        if shards <= done or (told is not None and time.monotonic() > until):
            break
        time.sleep(LOOK_S)
    newer = [event for event in told or [] if event["seq"] > since]
    if not last and (old := _last(newer, None)):
        last, shards = old, set(old)  # a syncer of an older release tells no serial
    for event in last.values():
        if event["kind"] == "restore-failed":
            raise CliError(str(event["text"]), FAILED)
    if not last and _restores(run) > serial:
        raise CliError(f"another restore of run {name!r} was asked for meanwhile", FAILED)
    # A leader that dies has perhaps shown that it is done with the wish, and not yet told how.
    if silent := sorted(shards - last.keys()):
        whose = f"syncer shard {', '.join(map(str, silent))} of run" if len(shards) > 1 else "run"
        raise CliError(
            f"{whose} {name!r} is done with the wish, and nothing tells whether it went back. "
            f"'diloco status {name}' shows its step: where that is not the checkpoint's or a "
            "little more, it has not, and you may ask again",
            FAILED,
        )


def _shards(run: dict[str, Any]) -> set[int]:
    """Of its syncer; each tells of its own part."""
    return set(range(run["spec"]["algorithm"].get("shards", 1)))


def _last(told: list[dict[str, Any]], serial: int | None) -> dict[int, dict[str, Any]]:
    """By shard: what became of one wish."""
    return {e["data"].get("shard", 0): e for e in told if e["data"].get("serial") == serial}


def _told(client: Client, run: str) -> list[dict[str, Any]]:
    """What became of wishes to go back, oldest first."""
    kinds = ("restored", "restore-failed")
    return [e for e in client.events(run) if e["kind"] in kinds]


@checkpoint.command()
@anywhere
def delete(
    where: Where,
    run: Annotated[
        str, typer.Argument(help="Name of the run; FOLDER/NUMBER, or FOLDER, of a deleted one.")
    ],
    number: Annotated[int, typer.Argument(min=0, help="Number of the checkpoint.")] = 0,
    as_json: Json = False,
) -> None:
    """Remove a checkpoint for good, or with FOLDER alone all that a deleted run has left."""
    # The folder of a run has its name, a dot and its id; no name has a dot.
    stored, whole = "/" in run, "." in run and "/" not in run
    if (stored or whole) == bool(number):
        raise CliError(
            "give a run and a number, FOLDER/NUMBER as 'list' shows it, or the FOLDER of a "
            "deleted run for all that is left of it",
            INVALID,
        )
    doing = "waits until all its files are removed"
    with connect(where) as client, meanwhile(doing, quiet=as_json):
        if number:
            client.delete_checkpoint(run, number)
        elif stored:
            client.delete_stored(run)
        else:
            client.delete_folder(run)
    told = f"{run}: all is removed" if whole else f"checkpoint {number or run} is removed"
    done = {"run": run, "number": number} if number else {"ref": run}
    show({**done, "removed": True}, as_json, lambda: [told])


def _line(c: dict[str, Any]) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(c["at"]))
    missing = f", without {', '.join(c['missing'])}" if c["missing"] else ""
    return (
        f"{c['ref']}: {c['run']} {c['number']}, {at}, step {c['stamp']['steps']}, "
        f"{len(c['learners'])} learners{missing}, {c['bytes'] / 1e6:.1f} MB ({c['reason']})"
    )


def _damaged_line(c: dict[str, Any]) -> str:
    return f"{c['reason']}: 'diloco checkpoint delete {c['ref']}' removes it"


def _tape_line(tape: dict[str, Any]) -> str:
    folder = tape["ref"].rpartition("/")[0]
    return (
        f"{tape['ref']}: the archived tape of a deleted run: 'diloco checkpoint delete {folder}' "
        "removes it, and all checkpoints of that run"
    )


def _details(c: dict[str, Any]) -> list[str]:
    return [
        f"  epoch {c['epoch']}, round {c['stamp']['round']}, {_versions(c['versions'])}",
        f"  {c['parameters']:,} parameters; moments of {', '.join(c['learners']) or 'nobody'}",
        *(f"  no part of {m}: {why}" for m, why in c["missing"].items()),
    ]


def _versions(of_fragments: list[int]) -> str:
    """Of all fragments: they are at one version, or at two that follow each other."""
    least, most = min(of_fragments), max(of_fragments)
    if least == most:
        return f"all fragments at version {least}"
    return f"fragments at versions {least} to {most}"
