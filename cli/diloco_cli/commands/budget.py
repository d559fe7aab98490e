"""`diloco budget`: what a run needs of streams, memory, disks and links, before it is submitted."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_cli.cluster import HERE
from diloco_cli.commands.options import (
    Checkpoints,
    DataRoot,
    Devices,
    Json,
    MeshSetting,
    show,
)
from diloco_cli.run_file import known_run
from diloco_cli.words import INVALID, CliError, counted
from diloco_shared.budget import known, learners_of
from diloco_shared.budget.terms import shown
from diloco_shared.budget.traffic import view
from diloco_shared.spec.algorithm import MEMBERS_MAX
from diloco_shared.spec.mesh import AUTO, DEVICES_MAX, MeshSizes, WrongMesh, fitted, idle, mesh_of
from diloco_shared.spec.run import RunSpec

app = typer.Typer()

# What lies in a stream of the hub.
_HOLDS = {
    "UP": "what learners contribute",
    "DN": "what syncers publish",
    "TAPE": "a record of each round",
    "STATE": "inner states and snapshots, for whoever joins",
    "checkpoints": "the place of run-wide checkpoints, which a deleted run leaves as it is",
}
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

File = Annotated[Path, typer.Argument(help="run.toml")]
Learners = Annotated[
    int,
    typer.Option(
        min=0, max=MEMBERS_MAX, help="How many learners the run has; 0: as many as it waits for."
    ),
]
Rate = Annotated[str, typer.Option(help="Of a link, per second, as 20Mbit, 5Gbit or 100MB.")]
Hosts = Annotated[
    int,
    typer.Option(
        min=1, max=DEVICES_MAX, help="Hosts of each learner; --devices counts those of all."
    ),
]
StepS = Annotated[float, typer.Option(min=0, help="Seconds of an inner step, where known.")]


@app.command()
def budget(
    file: File,
    learners: Learners = 0,
    rate: Rate = "1Gbit",
    step_s: StepS = 0.0,
    devices: Devices = 1,
    mesh: MeshSetting = AUTO,
    hosts: Hosts = 1,
    data_root: DataRoot = ".",
    checkpoints: Checkpoints = str(HERE / "checkpoints"),
    as_json: Json = False,
) -> None:
    """What a run needs, term by term: streams, memory, disks, transfers. Needs no cluster."""
    spec, unknown = known_run(file, data_root, checkpoints)
    # Of a model of one's own the file says how large it is, whatever its weights are.
    sized = not unknown or spec.model.factory is not None
    job = known(spec, learners=learners or learners_of(spec)) if sized else None
    if job is None:
        text = "the size of model.factory is known to learners only: set model.parameters"
        raise CliError(unknown or text, INVALID)
    sizes, unused = mesh_for(spec, devices, mesh)
    if sizes.devices < hosts:
        text = f"--hosts: the mesh {sizes} has {counted(sizes.devices, 'device')} for {hosts} hosts"
        raise CliError(text, INVALID)
    rate_bits = bits_per_s(rate)
    found = view(job, bits_per_s=rate_bits, step_s=step_s or None, mesh=sizes, hosts=hosts)
    found["idle"] = unused
    show(found, as_json, lambda: budget_lines(found, rate))


def mesh_for(spec: RunSpec, devices: int, mesh: str) -> tuple[MeshSizes, str]:
    """(how a learner's devices share this run, what is to be told of those that idle, or "").

    Raises CliError for a mesh that cannot be.
    """
    sequences = spec.inner.batch_sequences
    try:
        wanted = mesh_of(mesh)
        sizes = fitted(wanted, devices if wanted is None else wanted.devices, sequences)
    except WrongMesh as error:
        raise CliError(f"--mesh: {error}", INVALID) from None
    return sizes, "" if wanted else idle(sizes, devices, sequences)


def bits_per_s(rate: str) -> float:
    """`5Gbit` -> 5e9, `100MB` -> 8e8; CliError for what is no rate."""
    match = re.fullmatch(r"([0-9.]+) *([kKmMgGtT]?)(bit|B)(/s|ps)?", rate.strip())
    try:
        assert match is not None
        value = float(match[1]) * _UNITS[match[2].lower()] * (8 if match[3] == "B" else 1)
        assert value > 0
    except (AssertionError, ValueError):
        text = f"--rate {rate[:40]!r} is no rate: a number with kbit, Mbit, Gbit, MB or GB"
        raise CliError(text, INVALID) from None
    return value


def budget_lines(found: dict[str, Any], rate: str) -> list[str]:
    """The budget as plain tables."""
    named = _names(found)
    lines = [
        f"N, the number of parameters, is {found['parameters']:,}. They lie in "
        f"{counted(found['fragments'], 'fragment')}, of which the largest has "
        f"{found['largest_fragment']:,}. The run has {counted(found['learners'], 'learner')}."
    ]
    if found["mesh"] != str(MeshSizes()):
        on = f", on {found['hosts']} hosts" if found["hosts"] > 1 else ""
        lines.append(f"The devices of a learner share its work as {found['mesh']}{on}")
    if found["idle"]:
        lines.append(found["idle"])
    for title, part in (
        ("Streams of the hub, at their worst moments", "streams"),
        ("Memory of each process", "memory"),
        ("Disk", "disk"),
    ):
        lines += ["", title]
        for name, need in found[part].items():
            lines.append(
                f"{name:<{named + 2}}{shown(need['bytes']):>10}  {_HOLDS.get(name, '')}".rstrip()
            )
            lines += [
                f"  {t['name']:<{named}}{shown(t['bytes']):>10}  {t['how']}" for t in need["terms"]
            ]
    lines += ["", f"Transfers at {rate} a second"]
    lines += [
        f"  {t['name']:<{named}}{shown(t['bytes']):>10} {_time(t['seconds']):>10}  {t['how']}"
        for t in found["transfers"]
    ]
    per_s, on_disks = found["bits_per_s"], found["disk_bytes_per_s"]
    every = "per second" if per_s else "per inner step (--step-s)"
    lines += ["", f"Links, on average {every}"]
    unit = "bit/s" if per_s else "bit"
    lines += [
        f"  {name.replace('_', ' '):<{named}}{_bits(value) + unit:>14}"
        for name, value in (per_s or found["bits_per_step"]).items()
    ]
    lines += ["", f"Written to disks, on average {every}"]
    lines += [
        f"  {name:<{named}}{shown(value) + ('/s' if per_s else ''):>14}  "
        "snapshots and anchors before"
        for name, value in (on_disks or found["disk_bytes_per_step"]).items()
    ]
    return lines


def _names(found: dict[str, Any]) -> int:
    """Columns of the names of terms, so that what explains them has all the others."""
    needs = [need for part in ("streams", "memory", "disk") for need in found[part].values()]
    terms = [*found["transfers"], *(t for need in needs for t in need["terms"])]
    return max((len(t["name"]) for t in terms), default=0)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    if seconds < 120:
        return f"{seconds:.3g} s" if seconds >= 0.001 else f"{seconds * 1e3:.3g} ms"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def _bits(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} T"
