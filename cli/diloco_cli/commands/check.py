"""`diloco check`: whether a run can work on this machine, before it is submitted."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_cli.checking import Checker
from diloco_cli.cluster import HERE
from diloco_cli.commands.options import Checkpoints, DataRoot, Json, first_of, own_factories
from diloco_cli.lines import say
from diloco_cli.meanwhile import meanwhile
from diloco_cli.run_file import fill_in, read_run, spec_of
from diloco_cli.words import FAILED, INVALID, CliError, counted
from diloco_learner.hosts.place import WrongHosts, checkpoints_at
from diloco_learner.preflight.findings import Finding, skipped
from diloco_shared.spec.mesh import AUTO, WrongMesh, mesh_of
from diloco_shared.spec.run import RunSpec

app = typer.Typer()

# Checks of what a checkpoint says of a model; without it nobody knows.
OF_SHAPE = ("model", "device memory", "vocabulary", "host memory", "disk")
# In the place of the digest of weights that cannot be read.
UNKNOWN = "0" * 32
# Columns of a line: the verdict, and the name of the check.
VERDICT, NAME = 9, 15


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="run.toml")],
    data_root: DataRoot = ".",
    corpora: Annotated[
        Path | None,
        typer.Option(envvar="DILOCO_CORPORA", help="Where text is prepared, as for a learner."),
    ] = None,
    checkpoints: Checkpoints = str(HERE / "checkpoints"),
    mesh: Annotated[
        str,
        typer.Option(envvar="DILOCO_MESH", help="How devices share the work, as for a learner."),
    ] = AUTO,
    hosts_checkpoints: Annotated[
        str,
        typer.Option(
            envvar="DILOCO_HOSTS_CHECKPOINTS",
            help="Where all hosts of an island keep its checkpoints, as for a learner.",
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Try a run on this machine: model, weights, corpus, room, and one step. Needs no cluster."""
    cache = corpora or (HERE / "corpora" if HERE.is_dir() else None)
    further = os.environ.get("DILOCO_CHECKPOINT_ROOTS", "")
    try:
        mesh_of(mesh)
        kept_at = checkpoints_at(hosts_checkpoints)
    except WrongMesh as error:
        raise CliError(f"--mesh: {error}", INVALID) from None
    except WrongHosts as error:
        raise CliError(str(error), INVALID) from None
    checker = Checker(data_root, cache, checkpoints, further, own_factories(), mesh, kept_at)
    with meanwhile("tries the run on this machine", quiet=as_json):
        made = findings_of(*filled(read_run(file), checker, file), checker)
        findings = list(_shown(made, quiet=as_json))
    bad = [f for f in findings if not f.ok and not f.skipped]
    if as_json:
        print(json.dumps({"ok": not bad, "checks": [f.view() for f in findings]}))
    elif not bad:
        say("the run can work on this machine")
    else:
        say(f"{counted(len(bad), 'check')} found something wrong: mend it, and check again")
    if bad:
        raise typer.Exit(FAILED)


def filled(body: dict[str, Any], checker: Checker, file: Path) -> tuple[RunSpec, bool]:
    """The file's run, with what only this machine tells of it; whether its weights are not sound.

    Raises CliError for faults that need no machine to be seen.
    """
    faults = fill_in(body, first_of(checker.data_root), checker.checkpoints, checker.places)
    unsound = any(fault.path == "model.weights" for fault in faults)
    if unsound:
        given = {k: v for k, v in body["model"].items() if k not in ("preset", "overrides")}
        body["model"] = {**given, "weights_digest": UNKNOWN}
    return spec_of(body, file), unsound


def findings_of(spec: RunSpec, unsound: bool, checker: Checker) -> Iterator[Finding]:
    """Of a run as `filled` gives it."""
    for finding in checker.findings(spec):
        yield skipped(finding.name, ["weights"]) if _unknown(finding, unsound) else finding


def _unknown(finding: Finding, unsound: bool) -> bool:
    """Whether it is of another model than the one that the run's weights would have made it."""
    return unsound and finding.name in OF_SHAPE


def _shown(findings: Iterable[Finding], *, quiet: bool) -> Iterator[Finding]:
    """Each is printed as it comes: some take a while."""
    for finding in findings:
        if not quiet:
            say(*lines_of(finding))
        yield finding


def lines_of(finding: Finding) -> list[str]:
    """One check: what was found, and what to do where it is wrong."""
    lines = [f"{finding.verdict:<{VERDICT}}{finding.name:<{NAME}}{finding.text}"]
    if finding.remedy:
        lines.append(f"{'':<{VERDICT}}{'to do':<{NAME}}{finding.remedy}")
    return lines
