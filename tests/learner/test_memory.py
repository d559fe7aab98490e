"""What a learner holds: device arrays by count and bytes, at each phase, against the budget.

The budget (device): parameters, optimizer state, gradients while a step runs, one fragment's work,
residuals where the codec has some. The host holds the adopted anchors once, shared with the book.
"""

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from diloco_learner.models import tensor_specs, to_named, transformer
from diloco_learner.models.attention import rotary_tables
from diloco_learner.recovery import moments
from diloco_learner.training.evaluate import HeldOut
from diloco_learner.training.fragment_ops import FragmentOps
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.budget.job import known
from diloco_shared.budget.memory import SEQUENCES_MAX, activations, device, forward, learner
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import SHAPES, Shape, shape_of

FRAGMENTS, BATCH, CONTEXT = 3, 2, 8
# Losses, random keys and counts: nothing that grows with the model.
SMALL_BYTES = 4096


def made(codec: str = "bf16") -> Program:
    shape = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 2, "head_width": 16, "hidden": 64}
    return Program.build(
        RunSpec.model_validate(
            {
                "name": "r",
                "algorithm": {"fragments": FRAGMENTS, "sync_every_steps": 6, "codec_up": codec},
                "model": {"context_tokens": CONTEXT, "overrides": shape},
                "inner": {"batch_sequences": BATCH, "warmup_steps": 0},
                "budget": {"steps": 10},
            }
        )
    )


@pytest.fixture(scope="module")
def program() -> Program:
    return made()


class Held:
    """Bytes of device arrays that came to life since it was made."""

    def __init__(self) -> None:
        gc.collect()
        self.before = {id(a) for a in jax.live_arrays()}
        self.kept = list(jax.live_arrays())  # so that no id is used again

    def bytes(self) -> int:
        gc.collect()
        alive = (a for a in jax.live_arrays() if not a.is_deleted())
        return sum(a.nbytes for a in alive if id(a) not in self.before)


@pytest.fixture
def held() -> Iterator[Held]:
    """What is there before need not be looked at again in every collection: that takes a second."""
    found = Held()
    gc.freeze()
    yield found
    gc.unfreeze()


def batch(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (BATCH, CONTEXT + 1)).astype(np.int32)


def parameters(program: Program) -> int:
    return sum(program.layout.sizes)


def test_warming_up_compiles_everything_and_makes_no_second_state(held: Held) -> None:
    program = made()
    program.compile(BATCH)
    assert held.bytes() <= SMALL_BYTES, "from shapes alone"
    counts = [len(x.programs) for x in (program.step, program.cuts._adopt, program.cuts._encode)]
    trainer = Trainer(program)
    for p, anchor_F in enumerate(trainer.initial_fragments()):
        trainer.adopt(p, anchor_F, 0.0)
        trainer.contribution(p, 0).fetch()
    trainer.step(batch(), 0.1)
    after = [len(x.programs) for x in (program.step, program.cuts._adopt, program.cuts._encode)]
    assert after == counts, "and nothing is compiled again"


def test_at_each_phase_the_device_holds_parameters_and_moments(
    program: Program, held: Held
) -> None:
    state = 12 * parameters(program) + SMALL_BYTES
    trainer = Trainer(program)
    assert held.bytes() <= state, "built"
    trainer.warm_up(BATCH)
    assert held.bytes() <= state, "warmed up"
    anchors = [values_F.copy() for values_F in trainer.initial_fragments()]
    for p, anchor_F in enumerate(anchors):
        trainer.adopt(p, anchor_F, 0.0)
    assert held.bytes() <= state, "adopted: anchors are on the host"
    trainer.step(batch(), 0.1).block_until_ready()
    assert held.bytes() <= state, "stepped"
    sent = trainer.contribution(1, 0)
    assert held.bytes() <= state + 2 * program.layout.sizes[1], "one bf16 contribution"
    sent.fetch()
    del sent
    data = trainer.inner_state()
    assert held.bytes() <= state, "given away: the copy is on the host"
    trainer.load_inner_state(data)
    assert held.bytes() <= state, "received"
    trainer.evaluate(trainer.published(), HeldOut(batch()))
    assert held.bytes() <= state, "evaluated"


def test_evaluation_adds_the_published_parameters_and_no_more(
    program: Program, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a step; or alone, in what gradients take at other times."""
    trainer = Trainer(program)
    for p, anchor_F in enumerate(trainer.initial_fragments()):
        trainer.adopt(p, anchor_F.copy(), 0.0)
    seen: list[int] = []
    adopt = type(program.cuts).adopt

    def watching(*args: Any) -> Any:
        new = adopt(*args)
        seen.append(held.bytes())
        return new

    monkeypatch.setattr(type(program.cuts), "adopt", watching)
    trainer.evaluate(trainer.published(), HeldOut(batch()))
    assert len(seen) == FRAGMENTS
    work = 4 * max(program.layout.sizes)  # the anchor that is being adopted
    assert max(seen) <= 16 * parameters(program) + work + SMALL_BYTES


def test_adopted_anchors_are_shared_not_copied(program: Program) -> None:
    trainer = Trainer(program)
    anchor_F = np.zeros(program.layout.sizes[0], np.float32)
    trainer.adopt(0, anchor_F, 0.0)
    assert trainer.anchors[0] is anchor_F


def test_residuals_are_held_where_the_codec_has_some(held: Held) -> None:
    trainer = Trainer(made("int4"))
    assert held.bytes() <= 16 * parameters(trainer.program) + SMALL_BYTES


def test_an_inner_state_takes_the_place_of_the_old_one_bit_by_bit(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no time is there more on the device than the state and one tensor."""
    trainer = Trainer(program)
    trainer.step(batch(), 0.1)
    data = trainer.inner_state()
    arrays = moments.views(data)
    before = sum(array.nbytes for array in jax.live_arrays())
    there: list[int] = []
    ready = jax.block_until_ready

    def watching(new: Any) -> Any:
        there.append(sum(a.nbytes for a in jax.live_arrays() if not a.is_deleted()))
        return ready(new)

    monkeypatch.setattr("diloco_learner.training.trainer.jax.block_until_ready", watching)
    trainer.load_inner_state(data)
    assert len(there) == len(arrays)
    assert max(there) <= before + max(array.nbytes for array in arrays.values())


def test_an_inner_state_names_the_tensors_of_each_layer(program: Program) -> None:
    """As version 0.2.0 did, whose leaves held one layer each: either reads the other's."""
    trainer = Trainer(program)
    trainer.step(batch(), 0.1)
    arrays = moments.views(trainer.inner_state())
    mine = [name for name in arrays if name.endswith("mu/layer_01/attention/query_DxHK")]
    assert len(mine) == 1 and not any("layers/" in name for name in arrays)
    stacked = next(
        leaf
        for name, leaf in to_named(trainer.opt_state).items()
        if name.endswith("mu/layers/attention/query_DxHK")
    )
    np.testing.assert_array_equal(arrays[mine[0]], np.asarray(stacked)[1])


def test_views_of_a_received_state_are_its_own_bytes(program: Program) -> None:
    trainer = Trainer(program)
    trainer.step(batch(), 0.1)
    data = trainer.inner_state()
    arrays = moments.views(data)
    assert len(arrays) > len(jax.tree.leaves(trainer.opt_state))
    whole = np.frombuffer(data, np.uint8)
    assert all(np.shares_memory(a, whole) for a in arrays.values())


def test_fragments_cut_alike_share_their_programs() -> None:
    """Rows of one tensor, or tensors of the same shapes."""
    shapes = {"a": jax.ShapeDtypeStruct((12, 4), np.float32)}
    layout = Layout.build(tensor_specs(shapes, lambda name: False), 3)
    cuts = FragmentOps(layout, shapes, "bf16")
    cuts.compile(residuals=False)
    assert len(cuts._adopt.programs) == len(cuts._encode.programs) == 1
    params = {"a": jax.numpy.arange(48.0).reshape(12, 4)}
    for p, (piece,) in enumerate(layout.fragments):
        rows = np.asarray(cuts.read(p, params)).reshape(4, 4)
        np.testing.assert_array_equal(
            rows, np.arange(48.0).reshape(12, 4)[piece.start : piece.stop]
        )


def test_the_budget_counts_an_evaluation_only_beside_a_step(program: Program) -> None:
    """And of its activations no more sequences than go into one call."""

    def terms(**evaluation: Any) -> dict[str, int]:
        given = program.spec.evaluation.model_copy(update=evaluation)
        job = known(program.spec.model_copy(update={"evaluation": given}))
        assert job is not None
        return {
            term.name: term.bytes for need in (device(job), learner(job)) for term in need.terms
        }

    n, beside = parameters(program), terms()
    shape = shape_of(program.spec.model)
    assert beside["evaluation"] == 4 * n + forward(shape, SEQUENCES_MAX, CONTEXT, fused=True)
    assert beside["held-out text"] == 4 * 256 * (CONTEXT + 1)
    between = terms(beside_training=False, sequences=10)
    assert between["held-out text"] == 4 * 10 * (CONTEXT + 1)
    assert beside.keys() - between.keys() == {"evaluation"}
    # The forward pass of a batch is less than what its backward pass keeps.
    assert forward(shape, BATCH, CONTEXT) < activations(shape, BATCH, CONTEXT)


def a_layer(shape: Shape, batch: int, length: int) -> tuple[Any, Any, Any]:
    """(what computes one layer, its input in two bytes, its parameters)."""
    params = transformer.init(shape, jax.random.key(0))
    rotary = rotary_tables(shape, length)

    def block(x: Any, layer: Any) -> Any:
        return transformer._block(shape, rotary, None, x, layer, whole=True)[0]

    x_BxLxD = jax.numpy.ones((batch, length, shape.width), jax.numpy.bfloat16)
    return block, x_BxLxD, jax.tree.map(lambda x: x[0], params["layers"])


@pytest.mark.parametrize(
    "more", [{}, {"qk_norm": True}, {"post_norms": True}, {"attention_cap": 50.0}]
)
def test_the_backward_pass_of_a_layer_keeps_what_the_budget_counts(more: dict[str, Any]) -> None:
    """Neither norms nor what gates let through, and of attention its weights alone."""
    shape = replace(SHAPES["nano"], remat="none", **more)
    batch, length = 2, 48
    block, x_BxLxD, layer = a_layer(shape, batch, length)
    _, backward = jax.vjp(block, x_BxLxD, layer)
    leaves = jax.tree.leaves(backward)
    kept = [a for a in leaves if a.shape[:1] in ((batch,), (batch * length,))]
    least = batch * length * shape.kv_heads * shape.head_width
    counted = {id(a): a.nbytes for a in kept if a.size >= least}
    one, two = (activations(replace(shape, layers=n), batch, length) for n in (1, 2))
    assert sum(counted.values()) == two - one


@pytest.mark.parametrize("preset", ["nano", "nano-moe"])
def test_no_matrix_is_kept_in_the_type_in_which_it_is_multiplied(preset: str) -> None:
    """It is there in fp32 anyway, and layers are many."""
    shape = replace(SHAPES[preset], remat="none")
    block, x_BxLxD, layer = a_layer(shape, 2, 48)
    _, backward = jax.vjp(block, x_BxLxD, layer)
    matrices = {leaf.shape for leaf in jax.tree.leaves(layer) if leaf.ndim > 1}
    kept = {a.shape: a.dtype for a in jax.tree.leaves(backward) if a.shape in matrices}
    assert kept and set(kept.values()) == {jax.numpy.dtype("float32")}


def test_the_budget_of_fused_attention_has_no_weights() -> None:
    """cuDNN keeps a sum for each head and token, and makes gradients of queries in fp32."""
    shape = replace(SHAPES["1b"], remat="none", layers=1)
    batch, length = 4, 4096
    pairs, tokens = batch * shape.heads * length * length, batch * length
    for count, each in ((activations, 4 + 2 + 8), (forward, 4 + 2 + 4)):
        given = (shape, batch, length)
        apart = count(*given) - count(*given, fused=True)
        sums = 4 * tokens * shape.heads
        sums += 4 * tokens * shape.heads * shape.head_width if count is activations else 0
        assert apart == each * pairs - sums
    job = known(
        RunSpec.model_validate({"name": "r", "model": {"preset": "1b"}, "budget": {"steps": 1}})
    )
    assert job is not None
    plain, with_kernel = device(job, kernel=False).bytes, device(job).bytes
    assert with_kernel < plain and device(job, on_cpu=True).bytes > plain
    capped = {"preset": "1b", "overrides": {"attention_cap": 50.0}}
    job = known(RunSpec.model_validate({"name": "r", "model": capped, "budget": {"steps": 1}}))
    assert job is not None
    assert device(job).bytes == device(job, kernel=False).bytes


def test_where_documents_are_kept_apart_the_kernel_has_a_mask_for_even_contexts() -> None:
    def bytes_of(context: int, documents: str, *, kernel: bool = True) -> int:
        model = {"preset": "1b", "context_tokens": context}
        spec = {"name": "r", "model": model, "budget": {"steps": 1}}
        job = known(RunSpec.model_validate(spec | {"data": {"documents": documents}}))
        assert job is not None
        return device(job, kernel=kernel).bytes

    batch = RunSpec.model_validate({"name": "r", "budget": {"steps": 1}}).inner.batch_sequences
    more = bytes_of(1024, "apart") - bytes_of(1024, "packed")
    assert more % (5 * 1024 * 1024) == 0 and more >= 5 * 1024 * 1024 * batch
    assert bytes_of(1023, "apart") == bytes_of(1023, "apart", kernel=False)
    assert bytes_of(1023, "packed") < bytes_of(1023, "packed", kernel=False)


def test_where_products_are_kept_those_of_experts_are_made_again() -> None:
    """They are one for each expert, which the policy does not keep."""
    moe, length = SHAPES["nano-moe"], 48
    per_layer = {}
    for remat in ("products", "none"):
        one, two = (activations(replace(moe, remat=remat, layers=n), 2, length) for n in (1, 2))
        per_layer[remat] = (two - one) / (2 * length)
    width, heads = moe.width, moe.heads * moe.head_width
    assert per_layer["products"] == 2 * (2 * width + heads + 2 * moe.kv_heads * moe.head_width)
    assert per_layer["none"] > per_layer["products"] + 2 * 2 * moe.hidden


@pytest.mark.parametrize("preset", ["nano", "nano-moe"])
@pytest.mark.parametrize(("remat", "some"), [("none", True), ("products", True), ("layer", False)])
def test_a_layer_that_is_computed_again_takes_its_matrices_once_for_that(
    preset: str, remat: Any, some: bool
) -> None:
    """Devices that share matrices hand them round for every time that they are multiplied."""
    shape = replace(SHAPES[preset], remat=remat)
    block, x_BxLxD, layer = a_layer(shape, 2, 16)
    matrices = {leaf.shape for leaf in jax.tree.leaves(layer) if leaf.ndim > 1}
    again = [e for e in jax.make_jaxpr(block)(x_BxLxD, layer).eqns if "policy" in e.params]
    assert again, "norms are, always"
    assert any(v.aval.shape in matrices for e in again for v in e.invars) is some
