"""What a learner on several devices holds on each, what they say to each other, and how fast it is.

    python bench/learner_mesh.py [--parts memory collectives rate fragment] [--json FILE]
        [--page docs/results/learner_mesh.md]

Eight devices are simulated on the processor, and the programs are those of a real mesh.

memory: each program is compiled for models of billions of parameters, and nothing is computed. The
compiler says what a device holds while it runs: arguments, results and what lies between. To this
is added what lies there meanwhile. over: that over (whole state / devices that share it + one
fragment). Along the axis `data` each group of devices has a whole state. The
state is parameters and moments, and for a step, and what goes before it, gradients. Where fragments
are encoded it is what was withheld of all of them (int4) instead, and where parameters are
evaluated the published ones.

collectives: arrays for which devices wait for each other, counted in the compiled step of the
learner and in a bare one: the same loss, its gradient and optax, and nothing of ours around it.

rate: a learner's steps with what it does to fragments, over the bare compiled step alone. Both take
turns in one process, a few seconds each, so that what else the machine does strikes both. In every
step a fragment is adopted and one is contributed, as when all of them are exchanged once in as many
steps. Messages and other processes are left out.

fragment: one of the 24 fragments of a model of 4 billion parameters, with real tensors of its
sizes, is encoded and adopted. over: the most that the process held for it, over what the devices'
budgets for a fragment's work add up to. Its bytes are compared with those of one device's encoder.
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parent))

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from learner_memory import anonymous_mib, begin
from runs import keep, surroundings
from stepping.sizes import SIZES

from diloco_learner.exchange.encoding import Encoded
from diloco_learner.models import ModelDef, from_named, tensor_specs, to_named
from diloco_learner.models.sharding import transformer_sharding
from diloco_learner.recovery.moments import _layer
from diloco_learner.training.fragments_on_mesh import MeshFragmentOps, _spec
from diloco_learner.training.inner import optimizer
from diloco_learner.training.mesh import Placement, mesh_over
from diloco_learner.training.programs import compiler_options
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.budget import known
from diloco_shared.budget.memory import fragment_work
from diloco_shared.numerics import codec
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.mesh import mesh_of
from diloco_shared.spec.run import Model, RunSpec
from diloco_shared.spec.shapes import layer_name, layout_of

DEVICES = 8
SEED = 0
FRAGMENTS = 24
PARTS = ("memory", "collectives", "rate", "fragment")
# Presets, what is changed of them, and their meshes. Large vocabularies are shown by themselves.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "1b, 8192 tokens": ("1b", {"vocabulary": 8192}, "fsdp=8"),
    "1b": ("1b", {}, "fsdp=8"),
    "5b": ("5b", {}, "fsdp=8"),
    "5b, pairs": ("5b", {}, "fsdp=4,tensor=2"),
    "30b-a3b": ("30b-a3b", {}, "fsdp=2,expert=4"),
    "30b-a3b, one axis": ("30b-a3b", {}, "fsdp=8"),
    "30b-a3b, twice": ("30b-a3b", {}, "data=2,fsdp=4"),
    "30b-a3b, pairs": ("30b-a3b", {}, "fsdp=4,tensor=2"),
}
SMALL: dict[str, tuple[str, dict[str, Any], str]] = {
    "dense": ("micro", {}, "fsdp=8"),
    # More tokens in the vocabulary than in a step, so that those of the step go around.
    "dense, 2048 tokens": ("micro", {"vocabulary": 2048}, "fsdp=8"),
    "experts": ("nano-moe", {}, "fsdp=2,expert=4"),
}
# What the page of a learner's step times, too (`stepping.sizes`).
TIMED = "11m"
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
TARGETS = {"over": ("<=", 1.2), "step_rate_over_bare": (">=", 0.95)}


def spec_of(preset: str, overrides: Mapping[str, Any], context: int = 128) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "mesh",
            "seed": SEED,
            "algorithm": {
                "fragments": FRAGMENTS,
                "sync_every_steps": FRAGMENTS,
                "codec_up": "int4",
            },
            "model": {"preset": preset, "overrides": overrides, "context_tokens": context},
            "inner": {"batch_sequences": DEVICES},
            "budget": {"steps": 100},
        }
    )


def program_of(preset: str, overrides: Mapping[str, Any], mesh: str, context: int = 128) -> Program:
    sizes = mesh_of(mesh)
    assert sizes is not None
    devices = mesh_over(sizes, jax.devices())
    return Program.build(spec_of(preset, overrides, context), mesh=devices)


def whole_bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def own_bytes(tree: Any) -> int:
    """Of what one device holds of these shapes that say how they lie."""
    leaves = jax.tree.leaves(tree)
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves
    )


def laid(program: Program, tree: Any) -> Any:
    """Shapes that say how they lie."""
    lying = program.lying(tree)
    assert lying is not None
    named = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lying[name])
        for name, leaf in to_named(tree).items()
    }
    return from_named(tree, named)


# --- memory ---------------------------------------------------------------------------------------


def beside(compiled: Any) -> tuple[int, int]:
    """(arguments of one device, all that a program needs beside them)."""
    m = compiled.memory_analysis()
    more = m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes
    return int(m.argument_size_in_bytes), int(more)


def memory(preset: str, overrides: Mapping[str, Any], mesh: str) -> dict[str, Any]:
    """By phase what a device holds at most, and that over its share of the state and a fragment."""
    program = program_of(preset, overrides, mesh)
    ops = program.cuts
    assert isinstance(ops, MeshFragmentOps) and program.placement is not None
    params = laid(program, program.shapes)
    state = laid(program, jax.eval_shape(program.init_state, program.shapes))
    values, resident = whole_bytes(params), own_bytes((params, state))
    state_whole, largest = values + whole_bytes(state), 4 * max(program.layout.sizes)
    p = int(np.argmax(program.layout.sizes))
    sizes = mesh_of(mesh)
    assert sizes is not None
    parts, found = sizes.state_parts, dict[str, Any]()

    def put(phase: str, whole: int, peak: int) -> None:
        budget = whole // parts + largest
        found[phase] = {"peak_bytes": peak, "budget_bytes": budget, "over": peak / budget}
        print(f"  {phase:12} {peak / 1e9:8.3f} GB  over {peak / budget:.2f}", flush=True)

    _, more = beside(program.init.lower(jax.random.key(0)).compile())  # type: ignore[attr-defined]
    put("init", state_whole + values, more)
    _, more = beside(program.init_state.lower(params).compile())  # type: ignore[attr-defined]
    put("init moments", state_whole + values, own_bytes(params) + more)
    tokens = jax.ShapeDtypeStruct((DEVICES, 129), np.int32)
    given, more = beside(program.step.compile(params, state, tokens, np.float32(0)))
    put("step", state_whole + values, given + more)

    view, where, mesh_ = ops.views[p], ops.starts[p], program.placement.mesh
    leaves = tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh_, _spec(cut)))
        for (shape, dtype), cut in zip(view.view.leaves, view.cuts, strict=True)
    )
    flat = jax.ShapeDtypeStruct((view.padded,), np.float32, sharding=program.placement.flat)
    owed = -(-values // program.placement.devices)
    own = own_bytes(leaves)
    given, more = beside(ops._adopt.compile(view, leaves, where, flat, np.float32(0)))
    put("adopt", state_whole + values, resident + owed + given - own + more)
    given, more = beside(ops._encode.compile((view, "int4"), leaves, where, flat, flat))
    # The residual that goes in is counted with what is owed.
    given -= own_bytes(flat)
    put("contribute", state_whole + values, resident + owed + given - own + more)
    held = jax.ShapeDtypeStruct((DEVICES, 129), np.int32)
    given, more = beside(program.evaluate.loss.compile(params, held))
    put("evaluate", state_whole + values, resident + given + more)
    largest_leaf = max(jax.tree.leaves(state), key=lambda leaf: leaf.size)
    _, more = beside(_layer.lower(largest_leaf, 0).compile())
    put("checkpoint", state_whole, resident + more)
    return {"mesh": mesh, "parameters": values // 4, "largest_fragment": largest // 4} | found


# --- collectives and rate -------------------------------------------------------------------------


def bare_step(program: Program) -> Any:
    """The same model, optimizer and placement, and nothing else: lowered by itself."""
    model, inner, placement = program.model, program.spec.inner, program.placement
    assert placement is not None
    chosen = optimizer(inner, model.is_embedding, model.stacked, model.matrices)

    def loss_of(params: Any, tokens: Any) -> Any:
        return (
            (model.loss(params, tokens),) * 2
            if model.objective is None
            else model.objective(params, tokens)
        )

    def step(params: Any, state: Any, tokens: Any, rate: Any) -> Any:
        (_, loss), grads = jax.value_and_grad(loss_of, has_aux=True)(params, tokens)
        updates, state = chosen.update(grads, state, params)
        updates = jax.tree.map(lambda u: rate * u, updates)
        return optax.apply_updates(params, updates), state, loss

    shapes = program.shapes
    leaves, moments = placement.tree(shapes), placement.tree(jax.eval_shape(chosen.init, shapes))
    one = placement.replicated
    return jax.jit(
        step,
        donate_argnums=(0, 1),
        in_shardings=(leaves, moments, placement.batch(inner.batch_sequences), one),
        out_shardings=(leaves, moments, one),
        compiler_options=compiler_options(),
    )


def counted(compiled: Any) -> dict[str, int]:
    """Arrays that collectives of a compiled program hand round, by kind.

    Not instructions: the compiler puts several small ones into one, now so and now otherwise.
    """
    kinds: Counter[str] = Counter()
    for line in compiled.as_text().splitlines():
        found = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        if found is not None:
            kinds[found[2]] += len(re.findall(r"\w+\[[\d,]*\]", found[1]))
    return dict(sorted(kinds.items()))


def arguments(program: Program, context: int = 128) -> tuple[Any, ...]:
    params = laid(program, program.shapes)
    state = laid(program, jax.eval_shape(program.init_state, program.shapes))
    tokens = jax.ShapeDtypeStruct((DEVICES, context + 1), np.int32)
    return params, state, tokens, np.float32(0)


def collectives(preset: str, overrides: Mapping[str, Any], mesh: str) -> dict[str, Any]:
    program = program_of(preset, overrides, mesh)
    args = arguments(program)
    learner = counted(program.step.compile(*args))
    with program.scope():
        bare = counted(bare_step(program).lower(*args).compile())
    print(f"  learner {learner}\n  bare    {bare}", flush=True)
    more = {kind: n - bare.get(kind, 0) for kind, n in learner.items() if n > bare.get(kind, 0)}
    return {"mesh": mesh, "learner": learner, "bare": bare, "more_than_bare": more}


def rate(mesh: str, window_s: float, cycles: int) -> dict[str, Any]:
    """Steps a second with all that is done to fragments, over those of the bare step.

    A fragment is adopted and another one contributed in every step.
    """
    size = SIZES[TIMED]
    program = program_of(size.preset, size.overrides, mesh, size.context)
    trainer = Trainer(program)
    trainer.warm_up(DEVICES)
    anchors = [trainer.fragment(p).copy() for p in range(FRAGMENTS)]
    for p, anchor in enumerate(anchors):
        trainer.adopt(p, anchor, 0.0)
    rng = np.random.default_rng(SEED)
    tokens = rng.integers(0, 256, (DEVICES, size.context + 1)).astype(np.int32)
    with program.scope():
        bare = bare_step(program).lower(*arguments(program)).compile()
    placement = program.placement
    assert placement is not None
    state: list[Any] = [program.initial()]
    state.append(program.init_state(state[0]))
    spread_tokens = jax.device_put(tokens, placement.batch(DEVICES))
    rate_ = jax.device_put(np.float32(1e-4), placement.replicated)

    def one_bare(_: int) -> Any:
        state[0], state[1], loss = bare(state[0], state[1], spread_tokens, rate_)
        return loss

    def one_learner(n: int) -> Any:
        loss = trainer.step(tokens, 1e-4)
        adopted, given = n % FRAGMENTS, (n + FRAGMENTS // 2) % FRAGMENTS
        trainer.adopt(adopted, anchors[adopted], 0.5)
        trainer.contribution(given, n).fetch()
        trainer.decided(given, n, merged=True)
        return loss

    one_bare(0), one_learner(0)
    pairs = []
    for cycle in range(cycles):
        order = (one_bare, one_learner) if cycle % 2 == 0 else (one_learner, one_bare)
        by = {one.__name__: turn(one, window_s) for one in order}
        pairs.append([by["one_learner"], by["one_bare"]])
        print(f"  learner {pairs[-1][0]:.3f}, bare {pairs[-1][1]:.3f} steps/s", flush=True)
    ratios = [a / b for a, b in pairs]
    return {
        "mesh": mesh,
        "model": TIMED,
        "parameters": sum(program.layout.sizes),
        "step_rate_over_bare": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "steps_per_s": pairs,
        "window_s": window_s,
    }


def turn(one: Callable[[int], Any], seconds: float) -> float:
    """Steps a second; the loss of a step is read while the next one runs."""
    began, n, previous = time.perf_counter(), 0, None
    while time.perf_counter() < began + seconds:
        handle = one(n)
        if previous is not None:
            float(previous)
        previous, n = handle, n + 1
    if previous is not None:
        float(previous)
    return n / (time.perf_counter() - began)


# --- a fragment of a large model ------------------------------------------------------------------


def alone(preset: str, mesh: str, p: int) -> tuple[MeshFragmentOps, Any]:
    """Fragment p of a preset without the layers that it has no part of, and its tensors' shapes."""
    pieces = layout_of(Model(preset=preset), FRAGMENTS).fragments[p]
    layers: dict[str, list[str]] = {}  # of each tensor: in which layers the fragment has it
    for piece in pieces:
        assert piece.whole and piece.name.startswith("layer_")
        layer, _, tensor = piece.name.partition("/")
        layers.setdefault(tensor, []).append(layer)
    count = max(map(len, layers.values()))
    tree: Any = {"layers": {}}
    own = []
    for piece in pieces:
        layer, _, tensor = piece.name.partition("/")
        part, name = tensor.split("/")
        shape = jax.ShapeDtypeStruct((count, *piece.shape), np.float32)
        tree["layers"].setdefault(part, {})[name] = shape
        at = layers[tensor].index(layer)
        own.append(replace(piece, name=f"{layer_name(at)}/{tensor}"))
    model = ModelDef(lambda key: tree, lambda *_: None, lambda name: False, "layers")  # type: ignore[arg-type]
    sizes = mesh_of(mesh)
    devices = mesh_over(sizes, jax.devices()) if sizes is not None else None
    assert devices is not None
    placement = Placement.of(devices, replace(model, sharding=transformer_sharding), tree)
    layout = Layout(tensor_specs(tree, lambda name: False, "layers"), (tuple(own),))
    return MeshFragmentOps(layout, tree, "int4", "layers", placement), tree


def held(work: Callable[[], Any]) -> tuple[Any, int]:
    """What it gives, and the most bytes that the process held for it meanwhile."""
    before = anonymous_mib()[1]
    begin()
    found = jax.block_until_ready(work())
    return found, int((anonymous_mib()[0] - before) * 2**20)


def fragment(preset: str, mesh: str, p: int) -> dict[str, Any]:
    """Encode and adopt one fragment with real values."""
    ops, shapes = alone(preset, mesh, p)
    placement, rng = ops.placement, np.random.default_rng(SEED)
    size, view = ops.cuts[0].size, ops.views[0]

    def values(shape: tuple[int, ...], part: tuple[slice, ...]) -> Any:
        own = [len(range(*cut.indices(n))) for cut, n in zip(part, shape, strict=True)]
        return rng.standard_normal(own, np.float32)

    lying = placement.lying(shapes)
    leaves = {
        name: jax.make_array_from_callback(leaf.shape, lying[name], partial(values, leaf.shape))
        for name, leaf in to_named(shapes).items()
    }
    params, anchor = from_named(shapes, leaves), rng.standard_normal(size, np.float32)
    flat = jax.ShapeDtypeStruct((view.padded,), np.float32, sharding=placement.flat)
    given = tuple(leaves[name] for name in ops.names[0])
    ops._encode.compile((view, "int4"), given, ops.starts[0], flat, flat)
    ops._adopt.compile(view, given, ops.starts[0], flat, np.float32(0))
    print(f"  {size:,} values in {len(given)} leaves", flush=True)
    wanted = codec.encode("int4", anchor - ops.values(0, params))
    residual = ops.zeros(0)
    (parts, error), encoding = held(partial(ops.encode, 0, params, anchor, residual))
    sent = Encoded("int4", size, parts).fetch()
    equal = bytes(sent) == bytes(wanted)
    sent_bytes = len(sent)
    del parts, error, sent, wanted, given, leaves
    tree, adopting = held(partial(ops.adopt, 0, params, anchor, 0.0))
    exactly = np.array_equal(ops.values(0, tree), anchor)
    job = known(spec_of(preset, {}))
    sizes = mesh_of(mesh)
    assert job is not None and sizes is not None
    budget = fragment_work(job, sizes).bytes * sizes.devices
    found = {
        "mesh": mesh,
        "model": preset,
        "values": size,
        "encoded_bytes": sent_bytes,
        "bytes_of_one_device": equal,
        "adopted_exactly": exactly,
        "encoding_bytes": encoding,
        "adopting_bytes": adopting,
        "budget_bytes": budget,
        "over": max(encoding, adopting) / budget,
    }
    print(f"  {found}", flush=True)
    return found


# --- the command ----------------------------------------------------------------------------------

BEGIN, END = "<!-- figures -->", "<!-- end -->"


def table(found: Mapping[str, Any]) -> str:
    """What docs/results/learner_mesh.md shows."""
    lines = []
    if "memory" in found:
        phases = [n for n, v in next(iter(found["memory"].values())).items() if isinstance(v, dict)]
        lines += [f"| model | mesh | {' | '.join(phases)} |", "|---" * (len(phases) + 2) + "|"]
        for name, row in found["memory"].items():
            shown = [f"{row[n]['over']:.2f}" for n in phases]
            lines.append(f"| {name} | `{row['mesh']}` | {' | '.join(shown)} |")
        lines.append("")
    if "collectives" in found:
        lines += [
            "| model | mesh | the learner's step | more than the bare step's |",
            "|---" * 4 + "|",
        ]
        for name, row in found["collectives"].items():
            kinds = ", ".join(f"{n} {kind}" for kind, n in row["learner"].items())
            more = ", ".join(f"{n} {kind}" for kind, n in row["more_than_bare"].items()) or "none"
            lines.append(f"| {name} | `{row['mesh']}` | {kinds} | {more} |")
        lines.append("")
    if "rate" in found:
        r = found["rate"]
        lines += [
            f"The learner takes {r['step_rate_over_bare']:.3f} times as many steps a second as the "
            f"bare step ({r['lowest']:.3f} to {r['highest']:.3f} in {len(r['steps_per_s'])} pairs "
            f"of turns of {r['window_s']:g} seconds; 0.95 or more is asked for).",
            "",
        ]
    if "fragment" in found:
        f = found["fragment"]
        lines += [
            f"A fragment of {f['values']:,} values was encoded in "
            f"{f['encoding_bytes'] / 1e9:.2f} GB on all devices together, and adopted in "
            f"{f['adopting_bytes'] / 1e9:.2f} GB. Their budget is "
            f"{f['budget_bytes'] / 1e9:.2f} GB. Its bytes are those of one device: "
            f"{'yes' if f['bytes_of_one_device'] else 'NO'}. What was adopted is the anchor, bit "
            f"for bit: {'yes' if f['adopted_exactly'] else 'NO'}.",
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    """Print figures; write them as JSON, and into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--mesh", default="fsdp=8", help="of the rate and the fragment")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of one turn")
    parser.add_argument("--cycles", type=int, default=6, help="pairs of turns")
    parser.add_argument("--json", type=Path, help="write the figures there, beside what is there")
    parser.add_argument("--page", type=Path, help="put the tables into that page")
    args = parser.parse_args()
    if not 1 <= args.window <= 600 or args.cycles < 1:
        parser.error("give --window 1 to 600 seconds, and at least one of --cycles")
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as a learner's process does
    found: dict[str, Any] = {"devices": DEVICES, "seed": SEED}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    for part in args.parts:
        print(part, flush=True)
        match part:
            case "memory":
                for name in args.models:
                    print(f" {name}", flush=True)
                    found.setdefault(part, {})[name] = memory(*MODELS[name])
            case "collectives":
                found[part] = {name: collectives(*model) for name, model in SMALL.items()}
            case "rate":
                found[part] = rate(args.mesh, args.window, args.cycles)
            case "fragment":
                found[part] = fragment("5b", args.mesh, 3)
        told = {"load_average": os.getloadavg()[0], **surroundings(__file__)}
        found.setdefault("runs", {})[part] = told
        keep(args.json, found, indent=1)
    if args.page:
        text = args.page.read_text(encoding="utf-8")
        head, rest = text.split(BEGIN, 1)
        tail = rest.split(END, 1)[1]
        page = f"{head}{BEGIN}\n\n{table(found)}\n{END}{tail}"
        args.page.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
