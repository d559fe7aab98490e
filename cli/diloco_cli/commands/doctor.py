"""`diloco doctor`: whether this machine can work for its hub, and what to do if it cannot."""

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import structlog
import typer
from pydantic import ValidationError

from diloco_cli.checking import Checker
from diloco_cli.cluster import HERE
from diloco_cli.commands.check import filled, findings_of
from diloco_cli.commands.options import DataRoot, Json, own_factories
from diloco_cli.doctor import judging, machine_io
from diloco_cli.doctor.connecting_io import Knocking
from diloco_cli.doctor.hub_io import Hub
from diloco_cli.doctor.judging import CHECKS, Finding
from diloco_cli.lines import say
from diloco_cli.meanwhile import meanwhile
from diloco_cli.run_file import read_run
from diloco_cli.words import FAILED, INVALID, CliError
from diloco_learner.hosts.place import WrongHosts, checkpoints_at
from diloco_shared.budget import Job, Need, known
from diloco_shared.budget.memory import disks
from diloco_shared.process.settings import WorkerSettings, said_of
from diloco_shared.spec.mesh import AUTO, mesh_of

app = typer.Typer()
# Columns of a line: the verdict, and the name of the check.
VERDICT, NAME = 9, 20
# From the hub's name to what it answers.
AT_THE_HUB = CHECKS[CHECKS.index("name") : CHECKS.index("bandwidth down") + 1]


@app.command()
def doctor(
    file: Annotated[
        Path | None, typer.Argument(help="run.toml: look also whether this run can work here.")
    ] = None,
    data_root: DataRoot = ".",
    probe_mb: Annotated[
        float, typer.Option(min=0.1, max=256, help="Megabytes of a probe in each direction.")
    ] = 8.0,
    as_json: Json = False,
) -> None:
    """Look whether this machine can work for its hub, by the settings that its services have."""
    examined = Examination(quiet=as_json)
    with _without_logs(), meanwhile("looks at this machine and its hub", quiet=as_json):
        _examine(examined, file, data_root, int(probe_mb * 1e6))
    good = judging.sound(examined.findings)
    if as_json:
        print(json.dumps({"ok": good, "checks": [f.view() for f in examined.findings]}))
    else:
        say(judging.summary(examined.findings))
    if not good:
        raise typer.Exit(FAILED)


class Examination:
    """The findings so far; each is printed as it comes, since some take a while."""

    def __init__(self, *, quiet: bool) -> None:
        self.findings: list[Finding] = []
        self.failed: dict[str, str] = {}
        self._quiet = quiet

    def tell(self, finding: Finding) -> None:
        """Take a finding, unless what it rests on has failed: that is said in its place."""
        blocked = judging.blocked(finding.name, self.failed)
        if blocked is not None:
            self._cannot_be(blocked)
            return
        if finding.verdict == "FAIL":
            self.failed[finding.name] = finding.name
        self._add(finding)

    def leave_out(self, names: tuple[str, ...]) -> None:
        """Checks that cannot be made: the causes are known by now."""
        for name in names:
            finding = judging.blocked(name, self.failed)
            assert finding is not None
            self._cannot_be(finding)

    def _cannot_be(self, finding: Finding) -> None:
        """What rests on it cannot be made either."""
        self.failed[finding.name] = finding.text.rpartition(": ")[2]
        self._add(finding)

    def _add(self, finding: Finding) -> None:
        self.findings.append(finding)
        if not self._quiet:
            say(line_of(finding))


def line_of(finding: Finding) -> str:
    """Verdict, check, what was found, and what to do."""
    to_do = f". To do: {finding.remedy}" if finding.remedy else ""
    return f"{finding.verdict:<{VERDICT}}{finding.name:<{NAME}}{finding.text}{to_do}"


def _examine(examined: Examination, file: Path | None, data_root: str, probe: int) -> None:
    settings = _settings(examined)
    checker = _checker(data_root)
    run = None if file is None else filled(read_run(file), checker, file)
    job = None if run is None else known(run[0])
    need, place = _need(job), os.environ.get("DILOCO_HOSTS_CHECKPOINTS", "")
    if settings is not None:
        _hub(examined, settings, probe, job)
        # What is kept elsewhere needs no room there.
        examined.tell(machine_io.disk(settings.data, None if place else need))
    if place:
        examined.tell(_hosts_place(place, need))
    if run is None:
        examined.tell(machine_io.devices())
        return
    for finding in machine_io.of_run(findings_of(*run, checker)):
        examined.tell(finding)


def _settings(examined: Examination) -> WorkerSettings | None:
    """What the environment says, as a service reads it."""
    try:
        settings = WorkerSettings()
    except ValidationError as error:
        remedy = "mend the environment: every service would end with the same words"
        examined.tell(judging.failed("settings", said_of(error), remedy))
        examined.leave_out((*AT_THE_HUB, "disk"))
        return None
    where = settings.hub.shown
    examined.tell(Finding("settings", "ok", f"the hub is {where}, as {settings.id or 'no id yet'}"))
    return settings


def _hub(examined: Examination, settings: WorkerSettings, probe: int, job: Job | None) -> None:
    address = settings.hub
    try:
        named = [f"{host}:{port}" for host, port in address.endpoints()]
    except ValueError as error:
        examined.tell(judging.failed("name", str(error), "mend DILOCO_NATS_URL"))
        examined.leave_out(AT_THE_HUB[1:])
        return
    # Each of a hub's nodes by itself; what is shown is the way to the first that lets us in.
    tried = [Knocking(address, server) for server in range(len(named))]
    inside = [knocking for knocking in tried if knocking.steps()]
    knocking = (inside or tried)[0]
    for finding in knocking.findings:
        examined.tell(finding)
    if not inside:
        made = [finding.name for finding in examined.findings]
        examined.leave_out(tuple(name for name in AT_THE_HUB if name not in made))
        return
    identity = address.identity()
    hub = Hub(
        address=address,
        me=settings.id or (identity.name if identity else "doctor"),
        ours=machine_io.release(),
        info=knocking.info,
        connections=settings.connections,
        probe_bytes=probe,
        job=job,
        named=named,
        closed={named[k.server]: k.failure for k in tried if k not in inside},
        tell=examined.tell,
    )
    asyncio.run(hub.ask())


def _hosts_place(place: str, need: Need | None) -> Finding:
    """Where all hosts of an island keep its checkpoints, as a learner reads it."""
    try:
        return machine_io.hosts_place(checkpoints_at(place), need)
    except WrongHosts as error:
        remedy = "mend the environment: a learner would end with the same words"
        return judging.failed("hosts' checkpoints", str(error), remedy)


def _checker(data_root: str) -> Checker:
    corpora = os.environ.get("DILOCO_CORPORA", "")
    cache = Path(corpora) if corpora else HERE / "corpora" if HERE.is_dir() else None
    checkpoints = os.environ.get("DILOCO_CHECKPOINTS", "") or str(HERE / "checkpoints")
    further = os.environ.get("DILOCO_CHECKPOINT_ROOTS", "")
    mesh = os.environ.get("DILOCO_MESH", "") or AUTO
    try:
        mesh_of(mesh)
        return Checker(data_root, cache, checkpoints, further, own_factories(), mesh)
    except ValueError as error:
        raise CliError(str(error), INVALID) from None


def _need(job: Job | None) -> Need | None:
    """What a learner of the run keeps on its disk."""
    return None if job is None else disks(job)["learner"]


@contextmanager
def _without_logs() -> Iterator[None]:
    """What a connection logs stands in a finding already, and would stand between them."""
    before, loop = structlog.get_config(), logging.getLogger("asyncio")
    level = loop.level
    loop.setLevel(logging.ERROR)  # it warns of each encrypted connection that is dropped
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory(), processors=[_dropped])
    try:
        yield
    finally:
        structlog.configure(**before)
        loop.setLevel(level)


def _dropped(_: object, __: str, ___: object) -> str:
    raise structlog.DropEvent
