"""Every verb of the command: thin, each a few calls of the client."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.live import Live

from diloco_cli.cluster import Where, connect, only_run, pid_of
from diloco_cli.explain import explain
from diloco_cli.faults import CliError
from diloco_cli.view import run_lines, screen
from diloco_client import ApiError, Client

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train language models across islands of compute that may fail.",
)
out = Console()

Url = Annotated[str, typer.Option(help="Coordinator of a cluster elsewhere (DILOCO_URL).")]
Token = Annotated[str, typer.Option(help="Its token (DILOCO_TOKEN).")]
TokenFile = Annotated[str, typer.Option(help="File that holds the token.")]
Folder = Annotated[Path, typer.Option(help="Data folder of 'diloco up' on this machine.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Run = Annotated[str, typer.Argument(help="Name of the run; the newest if left out.")]
HERE = Path("diloco-data")


def show(value: Any, as_json: bool, text: Callable[[], list[str]]) -> None:
    """JSON on standard output, or lines for people."""
    if as_json:
        print(json.dumps(value))
    else:
        out.print(*text(), sep="\n", highlight=False, markup=False)


# --- the stack -----------------------------------------------------------------------------------


@app.command()
def up(
    learners: Annotated[int, typer.Option(min=0, max=64, help="Learners to start.")] = 3,
    data: Folder = HERE,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API, 0: any.")] = 8400,
    chaos: Annotated[bool, typer.Option(help="Allow faults to be injected.")] = False,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads per learner, 0: all.")] = 1,
) -> None:
    """Start message server, coordinator, syncer and learners here, and keep them alive."""
    from diloco_cli.up.stack import Stack

    stack = Stack(data, learners=learners, port=port, chaos=chaos, threads=threads)
    _ended(asyncio.run(_up(stack)))


async def _up(stack: Any) -> None:
    from diloco_shared.edges.stopping import until_stopped

    async def tell() -> None:
        await stack.up.wait()
        out.print(f"API and live page: {stack.url}  (token in {stack.data}/admin-token)")
        out.print("Ctrl-C stops everything. Submit a run: diloco submit run.toml")
        told = 0
        while True:
            for message in list(stack.messages)[told:]:
                out.print(message, highlight=False)
            told = len(stack.messages)
            await asyncio.sleep(0.5)

    async def both() -> None:
        talking = asyncio.create_task(tell())
        try:
            await stack.run()
        finally:
            talking.cancel()

    await until_stopped(both())


def _ended(_: None) -> None:
    out.print("Stopped.")


@app.command()
def down(data: Folder = HERE) -> None:
    """Stop what 'diloco up' runs in this data folder."""
    pid = pid_of(data)
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        raise CliError(f"process {pid} is gone already") from None
    deadline = time.monotonic() + 30
    while (data / "endpoint.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    out.print("Stopped.")


@app.command()
def demo(
    data: Folder = HERE,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API, 0: any.")] = 0,
) -> None:
    """Three learners train a small model on real text; one is killed and comes back."""
    from diloco_cli.demo import demo as run_demo

    raise typer.Exit(asyncio.run(run_demo(data, port=port, console=out)))


# --- runs ----------------------------------------------------------------------------------------


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(help="run.toml")],
    if_absent: Annotated[bool, typer.Option(help="No error if the run exists already.")] = False,
    as_json: Json = False,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
    data: Folder = HERE,
) -> None:
    """Submit a run."""
    import tomllib

    try:
        spec = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CliError(f"{file}: {error}") from None
    with connect(Where(url, token, token_file, data)) as client:
        try:
            run = client.create_run(spec)
        except ApiError as error:
            if not (if_absent and error.status == 409):
                raise
            run = client.run(str(spec["name"]))
    show(run, as_json, lambda: [f"run {run['name']}: {run['state']} - {run['reason']}"])


@app.command()
def status(
    run: Run = "",
    as_json: Json = False,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
    data: Folder = HERE,
) -> None:
    """Where a run stands."""
    with connect(Where(url, token, token_file, data)) as client:
        found, evaluations, last = _look(client, run)
    show(found, as_json, lambda: run_lines(found, evaluations, last))


def _look(
    client: Client, name: str
) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any] | None]:
    run = only_run(client, name)
    evaluations = client.metrics(run["name"])["evaluations"]
    rounds = client.rounds(run["name"])
    return run, evaluations, rounds[-1] if rounds else None


@app.command()
def watch(
    run: Run = "",
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
    data: Folder = HERE,
) -> None:
    """Look on until the run is over."""
    with (
        connect(Where(url, token, token_file, data)) as client,
        Live(console=out, auto_refresh=False) as live,
    ):
        while True:
            found, evaluations, last = _look(client, run)
            live.update(screen(found, evaluations, last, ()), refresh=True)
            if found["state"] in ("finished", "stopped"):
                return
            time.sleep(1.0)


@app.command()
def runs(
    as_json: Json = False,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
    data: Folder = HERE,
) -> None:
    """Every run."""
    with connect(Where(url, token, token_file, data)) as client:
        found = client.runs()
    show(found, as_json, lambda: [f"{r['name']}: {r['state']} - {r['reason']}" for r in found])


def _verb(name: str, text: str) -> None:
    """`pause`, `resume` and `stop` are one command each, alike but for the verb."""

    def command(
        run: Run = "",
        as_json: Json = False,
        url: Url = "",
        token: Token = "",
        token_file: TokenFile = "",
        data: Folder = HERE,
    ) -> None:
        with connect(Where(url, token, token_file, data)) as client:
            changed = getattr(client, name)(only_run(client, run)["name"])
        show(changed, as_json, lambda: [f"run {changed['name']} shall be {changed['desired']}"])

    command.__doc__ = text
    app.command(name)(command)


_verb("pause", "Hold every learner at a step boundary.")
_verb("resume", "Go on after a pause.")
_verb("stop", "Merge once more, evaluate, and end the run.")


@app.command()
def rounds(
    run: Run = "",
    newest: Annotated[int, typer.Option(min=1, help="How many.")] = 10,
    as_json: Json = False,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
    data: Folder = HERE,
) -> None:
    """Why each learner was merged or not."""
    with connect(Where(url, token, token_file, data)) as client:
        found = client.rounds(only_run(client, run)["name"])[-newest:]
    show(found, as_json, lambda: [line for r in found for line in _round_lines(r)])


def _round_lines(r: dict[str, Any]) -> list[str]:
    head = f"round {r['round']} fragment {r['fragment']} {r['outcome']}: {r['reason']}"
    return [head, *(f"  {v['learner']} {v['outcome']}: {v['reason']}" for v in r["verdicts"])]


@app.command()
def report(
    run: Run = "",
    as_json: Json = False,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
    data: Folder = HERE,
) -> None:
    """What a run achieved, in figures."""
    from diloco_cli.report import report as figures_of

    with connect(Where(url, token, token_file, data)) as client:
        found = only_run(client, run)
        name = found["name"]
        figures = figures_of(found, client.rounds(name), client.events(name))
    show(figures, as_json, lambda: [f"{k}: {v}" for k, v in figures.items()])


# --- members, events, faults ---------------------------------------------------------------------


@app.command()
def members(
    as_json: Json = False,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
    data: Folder = HERE,
) -> None:
    """Every process of the cluster."""
    with connect(Where(url, token, token_file, data)) as client:
        found = client.members()

    def line(m: dict[str, Any]) -> str:
        life = "alive" if m["alive"] else "gone"
        return f"{m['id']} ({m['role']}): {life}, run {m['assigned'] or '-'}, pid {m['pid']}"

    show(found, as_json, lambda: [line(m) for m in found])


@app.command()
def events(
    run: Annotated[str, typer.Argument(help="Name of the run; all if left out.")] = "",
    as_json: Json = False,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
    data: Folder = HERE,
) -> None:
    """What happened."""
    with connect(Where(url, token, token_file, data)) as client:
        found = client.events(run)

    def line(e: dict[str, Any]) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(e["at"]))
        return f"{at} {e['source']} {e['kind']}: {e['text']}"

    show(found, as_json, lambda: [line(e) for e in found])


@app.command()
def chaos(
    kind: Annotated[str, typer.Argument(help="kill, hang, slow or nan")],
    target: Annotated[str, typer.Argument(help="A member, or nats.")],
    at_step: Annotated[int, typer.Option(help="At this inner step of a learner.")] = -1,
    after: Annotated[float, typer.Option(min=0, help="After so many seconds.")] = 0.0,
    for_s: Annotated[float, typer.Option("--for", min=0, help="Duration in seconds.")] = 10.0,
    factor: Annotated[float, typer.Option(min=1, help="How much slower.")] = 2.0,
    as_json: Json = False,
    url: Url = "",
    token: Token = "",
    token_file: TokenFile = "",
    data: Folder = HERE,
) -> None:
    """Inflict a fault, where the deployment allows it."""
    settings: dict[str, Any] = {"after_s": after, "duration_s": for_s, "factor": factor}
    if at_step >= 0:
        settings["at_step"] = at_step
    with connect(Where(url, token, token_file, data)) as client:
        fault = client.chaos(kind, target, **settings)
    show(fault, as_json, lambda: [f"{fault['id']}: {kind} on {target} {fault['when']}"])


# --- configuration -------------------------------------------------------------------------------


@app.command()
def config(
    file: Annotated[Path | None, typer.Argument(help="run.toml to check")] = None,
    explained: Annotated[bool, typer.Option("--explain", help="Every setting, why.")] = False,
) -> None:
    """Check a run.toml, or explain every setting."""
    from diloco_shared.config import load_toml

    if explained:
        out.print(*explain(), sep="\n", highlight=False, markup=False)
    if file is None:
        return
    try:
        spec = load_toml(file.read_text(encoding="utf-8"))
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise CliError("\n".join([f"{file} has {len(lines)} faults", *lines])) from None
    except (OSError, ValueError) as error:
        raise CliError(f"{file}: {error}") from None
    print(spec.model_dump_json(indent=2))
