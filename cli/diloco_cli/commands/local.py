"""Commands about this machine: its cluster, the demo, configuration."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from rich.console import Console

from diloco_cli.api import answers
from diloco_cli.cluster import ENDING, HERE, endpoint_of, own
from diloco_cli.commands.options import Checkpoints, DataRoot, Folder, Json, show
from diloco_cli.lines import say
from diloco_cli.meanwhile import meanwhile
from diloco_cli.words import FAILED, INTERRUPTED, NO_CLUSTER, CliError
from diloco_shared.spec.algorithm import PRESETS
from diloco_shared.spec.mesh import DEVICES_MAX
from diloco_shared.spec.run import RunSpec

app = typer.Typer()

Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the API, 0: any.")]
# Starting takes some seconds. A cluster whose coordinator does not answer gives up by itself after
# a minute, and says why, so it is heard first. Stopping takes as long as the cluster says that it
# may; so long where it says nothing, since it has just begun.
START_S, DOWN_S = 90.0, 60.0
# A busy machine takes so much longer than anybody grants.
DOWN_MORE_S = 5.0
# The demo's training must be over by then, so that the whole takes less than five minutes; it takes
# about two on two cores.
DEMO_S = 270.0


@app.command()
def up(
    learners: Annotated[int, typer.Option(min=0, max=64, help="Learners to start.")] = 3,
    syncers: Annotated[
        int, typer.Option(min=1, max=16, help="Syncers to start: one leads, others stand by.")
    ] = 1,
    data: Folder = HERE,
    port: Port = 8400,
    chaos: Annotated[bool, typer.Option("--chaos", help="Allow faults to be injected.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads per learner, 0: all.")] = 1,
    devices_per_learner: Annotated[
        int,
        typer.Option(min=0, max=DEVICES_MAX, help="GPUs of each learner; 0: all of them, divided."),
    ] = 0,
    hosts_per_learner: Annotated[
        int, typer.Option(min=1, max=64, help="Processes that make one learner together.")
    ] = 1,
    detach: Annotated[bool, typer.Option("--detach", help="In the background.")] = False,
) -> None:
    """Start message server, coordinator, syncers and learners here, and keep them alive."""
    if detach:
        given = [f"--learners={learners}", f"--syncers={syncers}"]
        given += [f"--port={port}", f"--threads={threads}"]
        given += [f"--devices-per-learner={devices_per_learner}"]
        given += [f"--hosts-per-learner={hosts_per_learner}"]
        _detached(data, [*given, f"--data={data}", *(["--chaos"] if chaos else [])])
        return
    from diloco_cli.up.attended import attend
    from diloco_cli.up.stack import EachLearner, Stack
    from diloco_shared.process.stopping import until_stopped

    stack = Stack(
        data,
        learners=learners,
        syncers=syncers,
        port=port,
        chaos=chaos,
        each=EachLearner(threads, devices_per_learner, hosts_per_learner),
    )
    asyncio.run(until_stopped(attend(stack, Console()), ending=lambda: stack.stopping))
    say("Stopped.")


def _detached(data: Path, given: list[str]) -> None:
    """Start `diloco up` as a process of its own; returns once the API answers."""
    from diloco_cli.up.folder import DETACHED_OUT, in_use, supervisor_of, unusable
    from diloco_cli.up.folder import Folder as DataFolder
    from diloco_cli.up.process import last_line

    folder = DataFolder(data)
    logs = folder.logs
    log = logs / DETACHED_OUT
    if holder := supervisor_of(folder.path):  # whose output this is
        raise in_use(folder.path, holder)
    try:
        logs.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
    except OSError as error:
        raise unusable(folder.path, error) from None
    with log.open("ab") as out:  # at its end, wherever that is: the supervisor cuts it
        child = subprocess.Popen(
            [sys.executable, "-m", "diloco_cli", "up", *given],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    deadline = time.monotonic() + START_S
    try:
        with meanwhile("starts the message server and the coordinator"):
            while not _ready(data, child.pid):
                if child.poll() is not None:
                    said = last_line(log).removeprefix("diloco: ")
                    raise CliError(said, child.returncode or FAILED)
                if time.monotonic() > deadline:
                    text = f"process {child.pid} was not ready within {START_S:.0f} s: see {logs}"
                    raise CliError(text)
                time.sleep(0.1)
    except (KeyboardInterrupt, SystemExit):
        _stop(child, data)
        raise
    endpoint = endpoint_of(data)
    say(f"Running as process {child.pid}. API and live page: {endpoint['url']}")
    say(f"Token in {endpoint['token_file']}. Stop it with: {_down(data)}")


def _stop(child: "subprocess.Popen[bytes]", data: Path) -> None:
    """What nobody waits for any more does not go on unseen: it is stopped, or CliError names it."""
    within_s = _ends_s(data) + DOWN_MORE_S
    child.terminate()
    try:
        with meanwhile(f"stops what was started, within {within_s:.0f} s"):
            child.wait(within_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        text = f"process {child.pid} is still stopping; {_down(data)} waits for it"
        raise CliError(text, INTERRUPTED) from None
    say("Stopped.")


def _down(data: Path) -> str:
    return shlex.join(["diloco", "down", "--data", str(data)])


def _ready(data: Path, pid: int) -> bool:
    try:
        return endpoint_of(data)["pid"] == pid and answers(data)
    except CliError:
        return False


@app.command()
def down(data: Folder = HERE) -> None:
    """Stop what 'diloco up' runs in this data folder."""
    import psutil

    from diloco_cli.up.folder import supervisor_of

    pid = supervisor_of(data)
    if not pid:
        raise CliError(f"no cluster runs in {data}", NO_CLUSTER)
    own(data)
    within_s = _ends_s(data) + DOWN_MORE_S
    try:
        supervisor = psutil.Process(pid)
        os.kill(pid, signal.SIGTERM)
        with meanwhile(f"waits until every process has stopped, {within_s:.0f} s at most"):
            supervisor.wait(within_s)
    except (ProcessLookupError, psutil.NoSuchProcess):
        pass  # it ended a moment ago
    except PermissionError:
        raise CliError(f"process {pid} belongs to somebody else") from None
    except psutil.TimeoutExpired:
        raise CliError(f"process {pid} is still stopping after {within_s:.0f} s") from None
    say("Stopped.")


def _ends_s(data: Path) -> float:
    """So long the cluster of a folder takes to stop at most, in seconds; also while it stops."""
    unsaid = (CliError, OSError, KeyError, TypeError, ValueError)  # or of an earlier release
    with suppress(*unsaid):
        return float(endpoint_of(data)["ends_s"])
    with suppress(*unsaid):
        return float(json.loads((data / ENDING).read_text(encoding="utf-8"))["ends_s"])
    return DOWN_S


@app.command()
def demo(
    data: Folder = HERE,
    port: Port = 0,
    steps: Annotated[int, typer.Option(min=140, help="Length of the run.")] = 240,
    limit: Annotated[float, typer.Option(min=1, help="Seconds until it must be over.")] = DEMO_S,
) -> None:
    """Three learners train a small model on real text; one is killed and comes back."""
    from diloco_cli.demo import run_demo

    raise typer.Exit(run_demo(data, port=port, steps=steps, limit_s=limit, console=Console()))


@app.command()
def config(
    file: Annotated[Path | None, typer.Argument(help="run.toml to check")] = None,
    explained: Annotated[
        bool, typer.Option("--explain", help="Explain every setting, and why it is so.")
    ] = False,
    data_root: DataRoot = ".",
    checkpoints: Checkpoints = str(HERE / "checkpoints"),
    as_json: Json = False,
) -> None:
    """Check a run.toml and print it with every default, or explain every setting."""
    from diloco_cli.run_file import known_run, whole

    if file is None and not explained:
        raise typer.BadParameter("give a run.toml, or --explain")
    if explained:
        say(*explain())
    if file is None:
        return
    spec, unknown = known_run(file, data_root, checkpoints)
    if unknown:
        print(unknown, file=sys.stderr)
    print(spec.model_dump_json(indent=2) if as_json else whole(spec), end="\n" if as_json else "")


@app.command()
def version(as_json: Json = False) -> None:
    """Versions of what runs here."""
    from diloco_cli.report import versions

    found = versions()
    lines = [f"{name} {number}" for name, number in found["versions"].items()]
    show(found, as_json, lambda: [*lines, found["machine"]])


# --------------------------------------------------------------------------------------------------
# Every setting of a run with its default and the reason for it.


def explain() -> list[str]:
    """One line per setting, by path."""
    return [*_lines("", RunSpec), "", *_presets()]


def _lines(prefix: str, model: type[BaseModel]) -> list[str]:
    lines: list[str] = []
    for name, field in model.model_fields.items():
        path, kind = f"{prefix}{name}", field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            lines += _lines(path + ".", kind)
            continue
        default = "required" if field.default is PydanticUndefined else _written(field.default)
        if field.default_factory is not None:
            default = "empty"
        if prefix == "algorithm." and name in PRESETS["long"]:
            default = "by preset"
        lines.append(f"{path} = {default}: {field.description or ''}")
    return lines


def _written(value: Any) -> str:
    """A default as a file has it, or in words where a file has nothing."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return "empty" if value == () else repr(value)


def _presets() -> list[str]:
    return [
        f"preset {name}: " + ", ".join(f"{k} = {v}" for k, v in settings.items())
        for name, settings in PRESETS.items()
    ]
