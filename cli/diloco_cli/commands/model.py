"""`diloco model`: what a model is made of, before anything trains. Needs no cluster."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from diloco_cli.cluster import HERE
from diloco_cli.commands.budget import mesh_for
from diloco_cli.commands.options import (
    Checkpoints,
    DataRoot,
    Devices,
    Json,
    MeshSetting,
    show,
)
from diloco_cli.meanwhile import meanwhile
from diloco_cli.run_file import known_run
from diloco_cli.words import INVALID, CliError, why
from diloco_shared.budget import known
from diloco_shared.budget.memory import ONE_DEVICE, device
from diloco_shared.budget.terms import shown
from diloco_shared.hf.config import family
from diloco_shared.hf.resolving import resolved
from diloco_shared.hf.weights import WrongCheckpoint, digest_of, open_weights
from diloco_shared.spec.mesh import AUTO, MeshSizes, WrongMesh, mesh_of
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import (
    SHAPES,
    Shape,
    WrongModel,
    active_parameters,
    computed_flops_per_token,
    cut,
    flops_per_token,
    tensors,
)

app = typer.Typer()
model = typer.Typer(no_args_is_help=True, help="What a model is made of, before anything trains.")
app.add_typer(model, name="model")

What = Annotated[str, typer.Argument(help="A preset, run.toml, or folder of a checkpoint.")]
# Fields that are shown only where they are not the plain ones.
_ALWAYS = ("vocabulary", "width", "layers", "heads", "kv_heads", "head_width", "hidden")


@model.command()
def describe(
    what: What,
    fragments: Annotated[
        int, typer.Option(min=0, help="How many fragments to cut it into; 0: as many as the run.")
    ] = 0,
    devices: Devices = 1,
    mesh: MeshSetting = AUTO,
    data_root: DataRoot = ".",
    checkpoints: Checkpoints = str(HERE / "checkpoints"),
    as_json: Json = False,
) -> None:
    """Parameters, arithmetic, device memory and fragments of a model."""
    with meanwhile("reads the model", quiet=as_json):
        spec, digest = _spec(what, devices, mesh, data_root, checkpoints)
    sizes, unused = mesh_for(spec, devices, mesh)
    try:
        job = known(spec)
        if job is None or job.shape is None:
            raise CliError(
                "a model of your own (model.factory) is known to learners only: 'diloco check' "
                "builds it and says what it is made of",
                INVALID,
            )
        found = described(spec, job.shape, fragments or spec.algorithm.fragments, sizes)
        found["idle"] = unused
    except WrongModel as error:
        raise CliError(str(error), INVALID) from None
    if digest:
        found["weights_digest"] = digest
    show(found, as_json, lambda: _lines(what, found))


def _spec(
    what: str, devices: int, mesh: str, data_root: str, checkpoints: str
) -> tuple[RunSpec, str]:
    """A run with the model in question, and the digest of its weights if it has some.

    Where it is not said how many sequences a step has, it has as many for each of the devices.
    """
    if what in SHAPES:
        context = {"model": {"preset": what, "context_tokens": 2048 if what[0].isdigit() else 64}}
        return _with_sequences(_checked(context), devices, mesh), ""
    path = Path(what)
    try:
        if path.is_dir():
            weights = open_weights(path)
            table = resolved({"weights": str(path.absolute())}, Path())
            spec = _checked({"model": {**table, "context_tokens": 2048}})
            return _with_sequences(spec, devices, mesh), digest_of(weights)
        found = path.exists()
    except WrongCheckpoint as error:
        raise CliError(str(error), INVALID) from None
    except (OSError, ValueError) as error:
        raise CliError(_neither(what, why(error)), INVALID) from None
    if not found:
        raise CliError(_neither(what, "no such file or directory"), INVALID)
    spec, unknown = known_run(path, data_root, checkpoints)
    if unknown:
        raise CliError(unknown, INVALID)
    return spec, spec.model.weights_digest


def _neither(what: str, why_not: str) -> str:
    return f"{what} is no preset ({', '.join(SHAPES)}), and cannot be read: {why_not}"


def _with_sequences(spec: RunSpec, devices: int, mesh: str) -> RunSpec:
    """With so many sequences, at least its own, that all devices have as many."""
    try:
        wanted = mesh_of(mesh)
    except WrongMesh:
        return spec  # which is told later
    parts, least = wanted.batch_parts if wanted else devices, spec.inner.batch_sequences
    inner = spec.inner.model_copy(update={"batch_sequences": -(-least // parts) * parts})
    return spec.model_copy(update={"inner": inner})


def _checked(tables: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate({"name": "described", "budget": {"steps": 1}, **tables})


def described(
    spec: RunSpec, shape: Shape, fragments: int, mesh: MeshSizes = ONE_DEVICE
) -> dict[str, Any]:
    """JSON-ready. Counts tensors and fragments one by one: nothing is taken from a formula.

    `mesh`: how the devices of a learner share its work.
    Raises WrongModel where the model cannot be cut so.
    """
    every, layout = tensors(shape), cut(shape, fragments)
    values = {t.name: _size(t.shape) for t in every}
    covered: Counter[str] = Counter()
    for pieces in layout.fragments:
        for piece in pieces:
            covered[piece.name] += piece.size
    in_one = sum(
        1
        for pieces in layout.fragments
        for name in {p.name for p in pieces}
        if sum(p.size for p in pieces if p.name == name) == values[name]
    )
    algorithm = spec.algorithm.model_copy(update={"fragments": fragments})
    job = known(spec.model_copy(update={"algorithm": algorithm}))
    assert job is not None
    need = device(job, mesh=mesh)
    parameters = sum(values.values())
    return {
        "shape": asdict(shape),
        "family": family(shape),
        "parameters": parameters,
        "active_parameters": active_parameters(shape),
        "embedding_parameters": sum(values[t.name] for t in every if t.embedding),
        "context_tokens": spec.model.context_tokens,
        "flops_per_token": flops_per_token(shape, spec.model.context_tokens),
        "computed_flops_per_token": computed_flops_per_token(shape, spec.model.context_tokens),
        "device_bytes": need.view(),
        "devices": mesh.devices,
        "mesh": str(mesh),
        "idle": "",
        "batch_sequences": spec.inner.batch_sequences,
        "optimizer": spec.inner.optimizer,
        "tensors": len(every),
        "fragments": list(layout.sizes),
        "tensors_in_one_fragment": in_one,
        "tensors_cut_by_rows": len(every) - in_one,
        "every_value_once": dict(covered) == values,
    }


def _size(dims: tuple[int, ...]) -> int:
    size = 1
    for n in dims:
        size *= n
    return size


def _experts(found: dict[str, Any]) -> str:
    room = found["computed_flops_per_token"] / found["flops_per_token"]
    return (
        f"  experts      a token goes through {found['active_parameters']:,} parameters; with the "
        f"room that experts keep free, {room:.2f} times the operations below are computed"
    )


def _lines(what: str, found: dict[str, Any]) -> list[str]:
    shape, plain = found["shape"], asdict(Shape(1, 1, 1, 1, 1, 2, 1))
    fields = [f"{n} {shape[n]}" for n in _ALWAYS]
    special = [f"{n} {v}" for n, v in shape.items() if n not in _ALWAYS and v != plain[n]]
    sizes = found["fragments"]
    family_ = found["family"]
    head = f"{what}: {found['parameters']:,} parameters (N)"
    lines = [
        f"{head}, of which {found['embedding_parameters']:,} are embeddings.",
        f"  shape        {', '.join(fields)}",
        f"               {', '.join(special)}" if special else "",
        _experts(found) if shape["experts"] else "",
        f"  family       {family_}: it can be exported for transformers"
        if family_
        else "  family       none of transformers' computes what this shape does",
        f"  arithmetic   {found['flops_per_token']:.3g} operations per token of training, in "
        f"sequences of {found['context_tokens']}",
        f"  device       {shown(found['device_bytes']['bytes'])} "
        + (
            "in all"
            if found["devices"] == 1
            else f"on each of {found['devices']} ({found['mesh']})"
        )
        + ", with "
        f"{found['optimizer']} and batches of {found['batch_sequences']} sequences:",
    ]
    if found["idle"]:
        lines.insert(-1, f"  idle         {found['idle']}")
    lines += [
        f"               {shown(term['bytes']):>9}  {term['name']}: {term['how']}"
        for term in found["device_bytes"]["terms"]
    ]
    lines += [
        f"  fragments    {len(sizes)} of {min(sizes):,} to {max(sizes):,} values, made of "
        f"{found['tensors']} tensors",
        f"               {found['tensors_in_one_fragment']} lie in one fragment each, and "
        f"{found['tensors_cut_by_rows']} are cut by rows; "
        + (
            "every value is in exactly one fragment"
            if found["every_value_once"]
            else "SOME VALUES ARE MISSING OR DOUBLE: this is a fault, please report it"
        ),
    ]
    if "weights_digest" in found:
        lines.append(f"  digest       {found['weights_digest']} (model.weights_digest)")
    return [line for line in lines if line]
