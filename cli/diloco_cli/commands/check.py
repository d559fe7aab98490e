"""`diloco check`: whether a run can work on this machine, before it is submitted."""

import json
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_cli.checking import Checker
from diloco_cli.cluster import HERE
from diloco_cli.commands.options import Json
from diloco_cli.filling import fill_in
from diloco_cli.words import FAILED, INVALID, CliError, counted, why
from diloco_learner.preflight.findings import CHECKS, Finding, skipped, wrong
from diloco_shared.checking import Invalid
from diloco_shared.checking import check as checked
from diloco_shared.spec.faults import SpecFault
from diloco_shared.spec.run import RunSpec

app = typer.Typer()

# Columns of a line: the verdict, and the name of the check.
VERDICT, NAME = 9, 15


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="run.toml")],
    data_root: Annotated[
        Path,
        typer.Option(
            envvar="DILOCO_DATA_ROOT", help="Where relative paths begin, as for a learner."
        ),
    ] = Path(),
    corpora: Annotated[
        Path | None,
        typer.Option(envvar="DILOCO_CORPORA", help="Where text is prepared, as for a learner."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try a run on this machine: model, weights, corpus, room, and one step. Needs no cluster."""
    cache = corpora or (HERE / "corpora" if HERE.is_dir() else None)
    made = _findings(_body(file), Checker(data_root, cache), file)
    findings = [f for f in _shown(made, quiet=as_json)]
    bad = [f for f in findings if not f.ok and not f.skipped]
    if as_json:
        print(json.dumps({"ok": not bad, "checks": [f.view() for f in findings]}))
    elif not bad:
        print("the run can work on this machine")
    else:
        print(f"{counted(len(bad), 'check')} found something wrong: mend it, and check again")
    if bad:
        raise typer.Exit(FAILED)


def _body(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CliError(f"{file} cannot be read: {why(error)}", INVALID) from None


def _findings(body: dict[str, Any], checker: Checker, file: Path) -> Iterator[Finding]:
    """Of the file's run. Raises CliError for faults that need no machine to be seen."""
    unsound = [f for f in fill_in(body, checker.root) if f.path == "model.weights"]
    spec = _spec(body, file, aside={"model.weights_digest"} if unsound else set())
    if spec is not None:
        yield from checker.findings(spec)
        return
    # The model's shape comes from its weights: without them nothing of it can be tried.
    for name in CHECKS:
        if name == "weights":
            yield wrong(name, unsound[0].message, REMEDY)
        else:
            yield skipped(name, ("weights",))


REMEDY = (
    "let model.weights name the folder of a checkpoint; a relative path begins in the data root"
)


def _spec(body: dict[str, Any], file: Path, aside: set[str]) -> RunSpec | None:
    """None if nothing is wrong with the file but what is told otherwise."""
    try:
        return checked(body)
    except Invalid as error:
        faults: Iterable[SpecFault] = [f for f in error.faults if f.path not in aside]
    if not (lines := [f"  {fault.path}: {fault.message}" for fault in faults]):
        return None
    text = "\n".join([f"{file} has {counted(len(lines), 'fault')}", *lines])
    raise CliError(text, INVALID)


def _shown(findings: Iterable[Finding], *, quiet: bool) -> Iterator[Finding]:
    """Each is printed as it comes: some take a while."""
    for finding in findings:
        if not quiet:
            print(*lines_of(finding), sep="\n", flush=True)
        yield finding


def lines_of(finding: Finding) -> list[str]:
    """One check: what was found, and what to do where it is wrong."""
    lines = [f"{finding.verdict:<{VERDICT}}{finding.name:<{NAME}}{finding.text}"]
    if finding.remedy:
        lines.append(f"{'':<{VERDICT}}{'to do':<{NAME}}{finding.remedy}")
    return lines
