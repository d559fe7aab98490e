"""Commands about a run's tape. They speak to the message server itself: REST has no tape."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from pydantic import ValidationError

from diloco_cli.cluster import HERE
from diloco_cli.commands.options import Folder, Json, NatsCredentials, NatsToken, NatsUrl, show
from diloco_cli.lines import say
from diloco_cli.meanwhile import meanwhile
from diloco_cli.message_server import Login, bus_of
from diloco_cli.tape_file import FORMATS, Rows, check, plain
from diloco_cli.tape_lines import record_line
from diloco_cli.words import FAILED, INVALID, UNKNOWN, CliError, counted, why
from diloco_shared.bus.port import Bus, BusError, NoStream
from diloco_shared.bus.stored_records import record_at
from diloco_shared.checkpoints.tape_archive_io import TapeReader, archives_of
from diloco_shared.checkpoints.vault_io import VaultError
from diloco_shared.durable import replacing
from diloco_shared.protocol import subjects
from diloco_shared.protocol.records import RunRecord
from diloco_shared.protocol.wire import WireError
from diloco_shared.spec.run import RunSpec

if TYPE_CHECKING:  # slow to import, and only what executes a tape needs it
    from diloco_syncer.history.audit_io import Replayed

T = TypeVar("T")

# As every process of a cluster is told. Of the cluster of this machine it says nothing: `diloco up`
# keeps what is in the profile from its processes.
PLACE = "DILOCO_CHECKPOINTS"

app = typer.Typer()
tape = typer.Typer(no_args_is_help=True, help="The record of every round: show, verify, export.")
app.add_typer(tape, name="tape")

Run = Annotated[str, typer.Argument(help="Name of the run.")]
Shard = Annotated[int, typer.Option(min=0, help="Syncer shard, of a run that has several.")]
Checkpoints = Annotated[
    str,
    typer.Option(
        help="Where run-wide checkpoints and archived tapes are. If it is left out: with "
        f"--nats-url where {PLACE} says, else in --data."
    ),
]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A run's specification and tape, the bus they came from, and the place of checkpoints."""

    spec: RunSpec
    records: TapeReader
    bus: Bus
    checkpoints: str


def _on_tape(
    run: str,
    data: Path,
    login: Login,
    act: Callable[[Recorded], Awaitable[T]],
    shard: int = 0,
    checkpoints: str = "",
    *,
    quiet: bool = False,
) -> T:
    """Connect, and do `act` with the tape; CliError says what is missing. `quiet`: what it prints
    meanwhile shows that it works."""

    async def work() -> T:
        bus = await bus_of(login, data)
        try:
            told = checkpoints or (os.environ.get(PLACE, "") if login.url else "")
            root = told or str(data / "checkpoints")
            return await act(await _recorded(bus, run, shard, root))
        except VaultError as error:
            raise CliError(f"{error} (--checkpoints names another place)") from None
        except BusError as error:
            raise CliError(f"the message server does not give it: {error}") from None
        except WireError as error:
            raise CliError(str(error)) from None
        finally:
            await bus.close()

    with meanwhile("reads the tape", quiet=quiet):
        return asyncio.run(work())


async def _recorded(bus: Bus, run: str, shard: int, root: str) -> Recorded:
    try:
        found = await record_at(bus, subjects.RUNS, run, RunRecord)
    except WireError as error:
        raise CliError(f"the record of run {run!r} cannot be read: {error}") from None
    if found is None:
        known = ", ".join(sorted(await bus.kv_all(subjects.RUNS))) or "none"
        raise CliError(f"there is no run {run!r}; known: {known}", UNKNOWN)
    try:
        spec = RunSpec.model_validate(found.record.spec)
    except ValidationError as error:
        text = f"run {run!r} was submitted by another release; this one cannot read it: {error}"
        raise CliError(text) from None
    try:
        end = (await bus.stream_info(subjects.tape_stream(run))).last_seq
    except NoStream:
        end = 0  # no syncer has begun with it yet
    shards = spec.algorithm.shards
    if shard >= shards:
        raise CliError(f"run {run!r} has {shards} shards, numbered from 0", UNKNOWN)
    return Recorded(spec, TapeReader(bus, run, archives_of(spec, root)[shard], end), bus, root)


@tape.command("show")
def show_tape(
    run: Run,
    begin: Annotated[int, typer.Option("--from", min=0, help="First record shown.")] = 0,
    checkpoints: Checkpoints = "",
    shard: Shard = 0,
    data: Folder = HERE,
    nats_url: NatsUrl = "",
    nats_token: NatsToken = "",
    nats_credentials: NatsCredentials = "",
    as_json: Json = False,
) -> None:
    """Every record, one line each."""

    async def act(found: Recorded) -> None:
        before = "["
        async for seq, record in found.records.after(max(begin - 1, 0)):
            if not as_json:
                say(record_line(seq, record))
            else:
                row = {"seq": seq, **plain(record.model_dump(mode="json"))}
                print(before + json.dumps(row), end="")
            before = ", "
        if as_json:
            print("]" if before == ", " else "[]")
        elif before == "[":
            say("the tape is empty")

    login = Login(nats_url, nats_token, nats_credentials)
    _on_tape(run, data, login, act, shard, checkpoints, quiet=True)


@tape.command()
def export(
    run: Run,
    file: Annotated[Path, typer.Argument(help=".jsonl: JSON lines; .msgpack: msgpack objects.")],
    checkpoints: Checkpoints = "",
    shard: Shard = 0,
    data: Folder = HERE,
    nats_url: NatsUrl = "",
    nats_token: NatsToken = "",
    nats_credentials: NatsCredentials = "",
) -> None:
    """Write every record to a file."""
    _format(file)

    async def act(found: Recorded) -> int:
        rows = Rows(file.suffix)
        try:
            _no_other(file)
            with replacing(file) as out:
                async for seq, record in found.records.after():
                    out.write(rows.row({"seq": seq, **record.model_dump(mode="json")}))
                out.write(rows.end())
        except VaultError:
            raise
        except OSError as error:
            raise CliError(f"{file} cannot be written: {why(error)}") from None
        return rows.count

    login = Login(nats_url, nats_token, nats_credentials)
    count = _on_tape(run, data, login, act, shard, checkpoints)
    say(f"{count} records in {file}")


def _no_other(file: Path) -> None:
    """CliError for a file that no export has written: it may be somebody's work."""
    if file.exists() and file.stat().st_size:
        sound, fault = _checked(file)
        if fault and not sound:
            text = f"{file} is there, and is no export of a tape: name another file, or remove it"
            raise CliError(text, INVALID)


@tape.command("check")
def check_file(
    file: Annotated[Path, typer.Argument(help="What 'tape export' wrote.")], as_json: Json = False
) -> None:
    """Whether an exported file is, byte for byte, as it was written; status 1 if not."""
    _format(file)
    sound, fault = _checked(file)
    told = f"{file}: {fault}" if fault else f"{sound} records, all as they were written"
    show({"records": sound, "fault": fault or None}, as_json, lambda: [told])
    if fault:
        raise typer.Exit(FAILED)


def _checked(file: Path) -> tuple[int, str]:
    """As `check`; one of many learners and days has more bytes than this machine has memory."""
    try:
        with file.open("rb") as there:
            return check(there, file.suffix)
    except OSError as error:
        raise CliError(f"{file} cannot be read: {why(error)}") from None


def _format(file: Path) -> None:
    if file.suffix not in FORMATS:
        raise CliError(f"{file}: name it {' or '.join(FORMATS)}, for the format", INVALID)


@tape.command()
def verify(
    run: Run,
    checkpoints: Checkpoints = "",
    shard: Shard = 0,
    data: Folder = HERE,
    nats_url: NatsUrl = "",
    nats_token: NatsToken = "",
    nats_credentials: NatsCredentials = "",
    as_json: Json = False,
) -> None:
    """Whether records follow each other, and every contribution still needed is there and sound."""
    from diloco_syncer.history import audit_io as audit

    async def act(found: Recorded) -> audit.Verified:
        return await audit.verify(found.spec, found.bus, found.records, found.checkpoints, shard)

    login = Login(nats_url, nats_token, nats_credentials)
    result = _on_tape(run, data, login, act, shard, checkpoints)
    follow = "" if result.unfollowed else " follow each other"
    summary = (
        f"{result.records} records{follow}; {result.contributions} contributions "
        f"compared, {result.covered} covered by a snapshot"
    )
    born = [
        f"record {n} begins again from what was published: what follows is checked from there"
        for n in result.rebirths
    ]
    if result.unfollowed:
        born.append(
            f"record {result.unfollowed} goes back to a checkpoint that was removed, since a "
            "snapshot covers it: whether later records follow each other was not checked"
        )
    lines = [*([_fault_line(f) for f in result.faults] or [summary]), *born]
    show(asdict(result), as_json, lambda: lines)
    if result.faults:
        raise typer.Exit(FAILED)


@app.command()
def replay(
    run: Run,
    snapshots: Annotated[
        list[Path] | None,
        typer.Option(help="A syncer's snapshot folder of the run; all of --data if left out."),
    ] = None,
    checkpoints: Checkpoints = "",
    shard: Shard = 0,
    data: Folder = HERE,
    nats_url: NatsUrl = "",
    nats_token: NatsToken = "",
    nats_credentials: NatsCredentials = "",
    as_json: Json = False,
) -> None:
    """Execute a run's merges again and compare every digest; status 1 at the first difference."""
    from diloco_syncer.history import audit_io as audit
    from diloco_syncer.snapshots.snapshots_io import SNAPSHOTS

    async def act(found: Recorded) -> audit.Replayed:
        of_shard = f"/shard-{shard}" if shard else ""
        where = f"*/{SNAPSHOTS}/{found.spec.folder}{of_shard}"
        folders = snapshots or sorted(data.glob(where))
        return await audit.reexecute(
            found.spec, found.bus, found.records, folders, found.checkpoints, shard
        )

    login = Login(nats_url, nats_token, nats_credentials)
    result = _on_tape(run, data, login, act, shard, checkpoints)
    show(asdict(result), as_json, lambda: replayed_lines(result))
    if result.fault is not None:
        raise typer.Exit(FAILED)


# What a run must keep to be executed from its beginning.
KEEP_ALL = 'keeping.contributions = "all" in a run\'s specification keeps all of them'


def replayed_lines(result: "Replayed") -> list[str]:
    """What was executed and what came of it; for what is not there, how to keep it."""
    begin = f"the snapshot of record {result.began_at}" if result.began_at else "the beginning"
    merges = counted(result.rounds, "merge")
    done = f"{counted(result.records, 'record')} from {begin} on, {merges}"
    if result.fault is None:
        lines = [f"{done}: every digest is the same"]
        before = "what came before was merged of contributions that are removed since"
        return [*lines, f"{before}: {KEEP_ALL}"] if result.began_at else lines
    if result.fault.purged:
        told = "contributions are removed once a snapshot covers them: run this again"
        return [
            f"not all could be executed, after {done}:",
            _fault_line(result.fault),
            f"{told}, or {KEEP_ALL}",
        ]
    return [f"the first difference, after {done}:", _fault_line(result.fault)]


def _fault_line(fault: Any) -> str:
    return fault.text if fault.text.startswith("record ") else f"record {fault.seq}: {fault.text}"
