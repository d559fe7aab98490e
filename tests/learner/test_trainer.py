"""A learner's state: adoption exact, contributions exact, moments kept and handed on."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load, save

from diloco_learner.models import to_named
from diloco_learner.training.evaluate import HeldOut
from diloco_learner.training.trainer import (
    Program,
    Trainer,
    assemble,
    evaluate_anchors,
)
from diloco_shared.numerics import codec
from diloco_shared.spec.run import RunSpec

FRAGMENTS = 3


def make_spec(**inner: Any) -> RunSpec:
    """As the shared fixture, but with bf16 contributions; no corpus is read."""
    shape = {"width": 8, "layers": 1, "heads": 2, "kv_heads": 2, "head_width": 4, "hidden": 8}
    return RunSpec.model_validate(
        {
            "name": "r",
            "seed": 3,
            "algorithm": {"fragments": FRAGMENTS, "sync_every_steps": 6},
            "model": {"context_tokens": 8, "overrides": shape},
            "inner": {"batch_sequences": 2, "warmup_steps": 0, **inner},
            "budget": {"steps": 10},
        }
    )


@pytest.fixture(scope="module")
def program() -> Program:
    return Program.build(make_spec())


def test_a_model_of_more_tensors_than_a_message_can_name_is_refused_where_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else its first fragment would be on its way when the first message fails, at every start."""
    apart = {f"layers/{n}/experts/{e}": (1,) for n in range(48) for e in range(512)}
    own = SimpleNamespace(
        init=lambda key: {name: jnp.zeros(shape) for name, shape in apart.items()},
        loss=lambda params, batch: jnp.zeros(()),
    )
    monkeypatch.setitem(sys.modules, "scattered", SimpleNamespace(model=lambda config: own))
    spec = make_spec()
    model = spec.model.model_copy(update={"factory": "scattered:model", "overrides": {}})
    with pytest.raises(ValueError, match=r"the model has 24576 tensors: .* one holds \d+\. Let"):
        Program.build(spec.model_copy(update={"model": model}))


@pytest.mark.parametrize("kind", [jnp.bfloat16, jnp.float16, jnp.int32])
def test_a_model_whose_parameters_are_not_fp32_is_refused_where_it_is_built(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its first step ends the learner, at every start."""
    own = SimpleNamespace(
        init=lambda key: {"embed": jnp.zeros((256, 8)), "head": {"w": jnp.zeros((8, 256), kind)}},
        loss=lambda params, batch: params["embed"].mean(),
    )
    monkeypatch.setitem(sys.modules, "narrow", SimpleNamespace(model=lambda config: own))
    spec = make_spec()
    model = spec.model.model_copy(update={"factory": "narrow:model", "overrides": {}})
    wanted = rf"init\(\) makes head/w of type {jnp.dtype(kind)}, .* let init\(\) make float32"
    with pytest.raises(ValueError, match=wanted):
        Program.build(spec.model_copy(update={"model": model}))


@pytest.fixture
def trainer(program: Program) -> Trainer:
    """Stepped three times, so that moments and parameters are its own."""
    trained = Trainer(program)
    for p, anchor_F in enumerate(trained.initial_fragments()):
        trained.adopt(p, anchor_F, 0.0)
    for n in range(3):
        trained.step(batch(n), 0.01)
    return trained


def batch(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (2, 9)).astype(np.int32)


def bits(tree: Any) -> dict[str, bytes]:
    return {name: np.asarray(leaf).tobytes() for name, leaf in to_named(tree).items()}


def anchor_of(program: Program, p: int) -> np.ndarray:
    return np.random.default_rng(p).standard_normal(program.layout.sizes[p]).astype(np.float32)


def test_everyone_begins_with_the_same_parameters(program: Program) -> None:
    assert bits(Trainer(program).params) == bits(Trainer(program).params)


def test_the_same_steps_give_the_same_bits(program: Program, trainer: Trainer) -> None:
    again = Trainer(program)
    for n in range(3):
        again.step(batch(n), 0.01)
    assert bits(again.params) == bits(trainer.params)
    assert bits(again.opt_state) == bits(trainer.opt_state)


def test_a_repeated_batch_is_learned_from_guessing_on(program: Program) -> None:
    trainer = Trainer(program)
    losses = [float(trainer.step(batch(0), 0.03)) for _ in range(60)]
    assert losses[0] == pytest.approx(np.log(256) + 0.5, abs=0.7)
    assert losses[-1] < 0.5


@pytest.mark.parametrize("p", range(FRAGMENTS))
def test_adopting_overwrites_exactly_its_fragment_and_keeps_moments(
    program: Program, trainer: Trainer, p: int
) -> None:
    before, moments = trainer.initial_fragments(), bits(trainer.opt_state)
    anchor_F = anchor_of(program, p)
    trainer.adopt(p, anchor_F, 0.0)
    after = trainer.initial_fragments()
    for q in range(FRAGMENTS):
        expected = anchor_F if q == p else before[q]
        assert after[q].tobytes() == expected.tobytes(), f"fragment {q}"
    assert bits(trainer.opt_state) == moments
    assert not any(np.asarray(part).any() for part in trainer.contribution(p, 0).parts)


def test_alpha_keeps_that_share_of_ones_own(program: Program, trainer: Trainer) -> None:
    own, anchor_F = trainer.initial_fragments()[1], anchor_of(program, 1)
    trainer.adopt(1, anchor_F, 0.25)
    np.testing.assert_allclose(
        trainer.initial_fragments()[1], 0.25 * own + 0.75 * anchor_F, rtol=1e-5, atol=1e-6
    )
    # The base of contributions is what was published, not the mixture.
    delta = codec.decode("bf16", trainer.contribution(1, 0).fetch(), len(own))
    np.testing.assert_allclose(delta, 0.25 * (anchor_F - own), rtol=0.02, atol=1e-6)


def test_values_that_overflowed_are_gone_after_adoption(program: Program, trainer: Trainer) -> None:
    """0 * inf is nan: overwriting must not multiply."""
    trainer.params = jax.tree.map(lambda x: x * jnp.inf, trainer.params)
    for p in range(FRAGMENTS):
        trainer.adopt(p, anchor_of(program, p), 0.0)
    assert all(np.isfinite(f).all() for f in trainer.initial_fragments())


def test_of_values_that_overflowed_no_share_is_kept(program: Program, trainer: Trainer) -> None:
    own = trainer.initial_fragments()
    trainer.params = jax.tree.map(lambda x: jnp.where(x > 0, jnp.inf, x), trainer.params)
    for p in range(FRAGMENTS):
        anchor_F = anchor_of(program, p)
        trainer.adopt(p, anchor_F, 0.5)
        wanted_F = np.where(own[p] > 0, anchor_F, 0.5 * own[p] + 0.5 * anchor_F)
        np.testing.assert_allclose(trainer.initial_fragments()[p], wanted_F, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("p", range(FRAGMENTS))
def test_a_contribution_is_anchor_minus_theta_in_bf16(
    program: Program, trainer: Trainer, p: int
) -> None:
    theta, anchor = trainer.initial_fragments()[p], np.asarray(trainer.anchors[p])
    assert not np.array_equal(theta, anchor)
    payload = trainer.contribution(p, 0).fetch()
    assert payload[8:] == (anchor - theta).astype(ml_dtypes.bfloat16).tobytes()
    assert payload == codec.encode("bf16", anchor - theta)
    assert len(payload) == codec.bytes_of("bf16", program.layout.sizes[p])


@pytest.fixture
def four_bits(program: Program) -> Trainer:
    """A learner that contributes in int4: the shared program but for its encoders."""
    algorithm = program.spec.algorithm.model_copy(update={"codec_up": "int4"})
    other = Program.build(program.spec.model_copy(update={"algorithm": algorithm}))
    return Trainer(replace(other, step=program.step, init=program.init))


def test_what_int4_withheld_goes_into_the_contribution_after_a_merged_one(
    four_bits: Trainer,
) -> None:
    """A new incarnation owes nothing: the first contribution is the pseudo-gradient alone."""
    p, rng = 1, np.random.default_rng(0)
    theta = four_bits.initial_fragments()[p]
    residual = np.zeros_like(theta)
    fates = {0: True, 3: False, 6: True, 9: True}
    for round_, merged in fates.items():
        anchor = theta + rng.normal(size=theta.size).astype(np.float32)
        four_bits.anchors[p] = anchor
        total = (anchor - theta) + residual
        payload = four_bits.contribution(p, round_).fetch()
        assert payload == codec.encode("int4", total), "the syncer's encoder, to the byte"
        four_bits.decided(p, round_, merged=merged)
        if merged:
            residual = total - codec.decode("int4", payload, len(total))
        feedback = four_bits.feedback[p]
        assert feedback is not None and not feedback.pending
        np.testing.assert_array_equal(np.asarray(feedback.residual), residual)
    assert residual.any()
    assert len(four_bits.program.cuts._encode.programs) == 1, "no round compiles anew"


def test_codecs_of_16_bits_and_more_keep_no_residual(trainer: Trainer) -> None:
    trainer.contribution(0, 5)
    trainer.decided(0, 5, merged=True)
    assert trainer.feedback == [None] * FRAGMENTS


def test_feedback_may_be_left_out(four_bits: Trainer) -> None:
    spec = four_bits.program.spec
    algorithm = spec.algorithm.model_copy(update={"error_feedback": False})
    program = replace(four_bits.program, spec=spec.model_copy(update={"algorithm": algorithm}))
    assert Trainer(program).feedback == [None] * FRAGMENTS


def test_a_contribution_is_a_handle_that_later_steps_do_not_change(trainer: Trainer) -> None:
    handle = trainer.contribution(0, 0)
    before = trainer.contribution(0, 0).fetch()
    trainer.step(batch(9), 0.1)
    assert handle.fetch() == before != trainer.contribution(0, 0).fetch()


def test_a_fragment_never_adopted_has_no_contribution(program: Program) -> None:
    with pytest.raises(AssertionError, match="fragment 0 was never adopted"):
        Trainer(program).contribution(0, 0)


def test_inner_state_is_handed_on_to_the_bit(program: Program, trainer: Trainer) -> None:
    data, before = bytes(trainer.inner_state()), bits(trainer.opt_state)
    trainer.step(batch(9), 0.1)  # donates the original
    newcomer = Trainer(program)
    parameters = bits(newcomer.params)
    newcomer.load_inner_state(data)
    assert bits(newcomer.opt_state) == before
    assert bits(newcomer.params) == parameters
    assert newcomer.inner_state() == data
    # It can be trained with.
    assert np.isfinite(float(newcomer.step(batch(1), 0.01)))


def changed(data: bytes, how: str) -> bytes:
    arrays = load(data)
    name = max(arrays, key=lambda key: arrays[key].size)
    match how:
        case "absent":
            del arrays[name]
        case "more":
            arrays["more"] = np.zeros(2, np.float32)
        case "shape":
            arrays[name] = arrays[name][:-1].copy()
        case "dtype":
            arrays[name] = arrays[name].astype(np.float64)
        case "diverged":
            arrays[name].reshape(-1)[0] = np.nan
    return save(arrays)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("absent", "of another model"),
        ("more", "of another model: more"),
        ("shape", "of another model"),
        ("dtype", "of another model"),
        ("diverged", "not finite"),
    ],
)
def test_an_inner_state_that_does_not_fit_is_refused_and_changes_nothing(
    trainer: Trainer, how: str, words: str
) -> None:
    before = bits(trainer.opt_state)
    data = changed(bytes(trainer.inner_state()), how)
    for method in (trainer.check_inner_state, trainer.load_inner_state):
        with pytest.raises(ValueError, match=words):
            method(data)
    assert bits(trainer.opt_state) == before


@pytest.mark.parametrize("cut", [0, 5, 200])
def test_torn_bytes_are_no_inner_state(trainer: Trainer, cut: int) -> None:
    with pytest.raises(ValueError, match="not an inner state"):
        trainer.check_inner_state(trainer.inner_state()[:cut])


def test_warming_up_changes_nothing(trainer: Trainer) -> None:
    before = bits((trainer.params, trainer.opt_state)), [id(a) for a in trainer.anchors]
    trainer.warm_up(2)
    assert (bits((trainer.params, trainer.opt_state)), [id(a) for a in trainer.anchors]) == before


def test_published_parameters_are_evaluated_not_ones_own(
    program: Program, trainer: Trainer
) -> None:
    sequences = batch(5)
    anchors = [np.asarray(a) for a in trainer.anchors]
    assembled = assemble(program, anchors)
    assert bits(assembled) == bits(program.initial())
    held, published = HeldOut(sequences), trainer.published()
    loss = trainer.evaluate(published, held).overall
    assert not published.anchors, "each is let go as it is taken"
    assert loss == evaluate_anchors(program, anchors, held)
    assert loss == program.evaluate(assembled, sequences)
    assert loss != program.evaluate(trainer.params, sequences)


def test_what_is_published_is_that_of_its_moment(program: Program, trainer: Trainer) -> None:
    held, before = HeldOut(batch(5)), trainer.published()
    wanted = trainer.evaluate(trainer.published(), held)
    for p, size in enumerate(program.layout.sizes):
        trainer.adopt(p, np.full(size, 0.5, np.float32), 0.0)
    assert trainer.evaluate(before, held) == wanted
    assert trainer.evaluate(trainer.published(), held) != wanted


def test_a_model_too_small_for_its_fragments_is_refused(tmp_path: Path) -> None:
    spec = make_spec().model_dump()
    spec["algorithm"] |= {"fragments": 300, "sync_every_steps": 300}
    with pytest.raises(ValueError, match=r"set algorithm.fragments lower"):
        Program.build(RunSpec.model_validate(spec))
