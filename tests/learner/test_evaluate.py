"""Evaluation: the same held-out sequences every time, and the mean over all of them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_learner.models import ModelDef
from diloco_learner.training.evaluate import (
    HeldOut,
    HeldOutLoss,
    Unwanted,
    corpus_names,
    held_out,
    held_out_of,
    targets,
)
from diloco_shared.budget.memory import SEQUENCES_MAX, TOKENS_MAX, evaluated_at_once
from diloco_shared.corpora.mix import Mixed
from diloco_shared.corpora.sequences import Tokens
from diloco_shared.spec.run import Data, RunSpec

TOKENS = np.arange(1001)


def test_sequences_are_seeded_and_distinct() -> None:
    chosen = held_out(TOKENS, 10, 20, seed=3)
    assert chosen.shape == (20, 11) and chosen.dtype == np.int32
    np.testing.assert_array_equal(chosen, held_out(TOKENS, 10, 20, seed=3))
    assert not np.array_equal(chosen, held_out(TOKENS, 10, 20, seed=4))
    assert len({row[0] for row in chosen}) == 20
    np.testing.assert_array_equal(chosen - chosen[:, :1], np.tile(np.arange(11), (20, 1)))


def test_more_sequences_begin_with_the_fewer() -> None:
    np.testing.assert_array_equal(held_out(TOKENS, 10, 40, 3)[:20], held_out(TOKENS, 10, 20, 3))


def test_of_very_many_windows_few_are_drawn_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco_learner.training.evaluate.ORDERED_MAX", 10)
    chosen = held_out(TOKENS, 10, 60, seed=3)
    assert len({row[0] for row in chosen}) == 60
    np.testing.assert_array_equal(chosen[:20], held_out(TOKENS, 10, 20, seed=3))
    assert len({row[0] for row in held_out(TOKENS, 10, 10**6, 0)}) == 100


def test_windows_of_mapped_tokens_are_those_of_an_array() -> None:
    parts = Tokens(np.split(TOKENS.astype(np.uint16), [3, 500]), 1001)
    np.testing.assert_array_equal(held_out(parts, 10, 20, 3), held_out(TOKENS, 10, 20, 3))


def test_no_more_than_there_are() -> None:
    assert len(held_out(TOKENS, 10, 10**6, 0)) == 100
    with pytest.raises(ValueError, match="has 10 tokens, a sequence 11"):
        held_out(np.arange(10), 10, 5, 0)


@pytest.mark.parametrize("sequences", [1, SEQUENCES_MAX, 2 * SEQUENCES_MAX + 3])
def test_every_sequence_counts_alike_in_whatever_batch(sequences: int) -> None:
    model = ModelDef(
        init=lambda key: (),
        loss=lambda params, batch: params * jnp.mean(batch.astype(jnp.float32)),
        is_embedding=lambda name: False,
    )
    rows = np.random.default_rng(0).integers(0, 100, (sequences, 5)).astype(np.int32)
    assert HeldOutLoss(model)(2.0, rows) == pytest.approx(2 * rows.mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("context", "trained", "wanted"),
    [
        (8, 1, SEQUENCES_MAX),
        (TOKENS_MAX // 8, 1, 8),
        (10 * TOKENS_MAX, 1, 1),
        (10 * TOKENS_MAX, 3, 3),  # what a step holds, an evaluation may hold too
    ],
)
def test_long_sequences_are_evaluated_few_at_a_time(
    context: int, trained: int, wanted: int
) -> None:
    assert evaluated_at_once(context, trained) == wanted


def masked_mean(params: float, batch: jax.Array) -> jax.Array:
    """A loss like the transformer's: over the targets, of which a token below 0 is none."""
    counts = batch[:, 1:] >= 0
    total = jnp.sum(jnp.where(counts, batch[:, 1:].astype(jnp.float32), 0.0))
    return params * total / jnp.maximum(jnp.sum(counts), 1)


def test_the_loss_is_the_mean_over_all_targets_however_they_lie_in_batches() -> None:
    """A sequence with few of them weighs little."""
    model = ModelDef(lambda key: (), masked_mean, lambda name: False, masked_tokens=True)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 100, (2 * SEQUENCES_MAX + 3, 9)).astype(np.int32)
    share = np.linspace(0, 1, len(rows))[:, None]  # the first have none, the last all
    rows = np.where(rng.random(rows.shape) < share, rows, ~rows)
    rows[:SEQUENCES_MAX] = np.where(rows[:SEQUENCES_MAX] < 0, rows[:SEQUENCES_MAX], ~5)
    wanted = rows[:, 1:][rows[:, 1:] >= 0]
    assert targets(rows) == len(wanted) > 0
    assert HeldOutLoss(model)(2.0, rows) == pytest.approx(2 * wanted.mean(), rel=1e-5)
    assert HeldOutLoss(model)(2.0, rows[:SEQUENCES_MAX]) == 0.0, "and no number without any"


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("sequences", [1, 3, 4, SEQUENCES_MAX + 7])
def test_the_devices_of_a_mesh_divide_every_batch_evenly(masked: bool, sequences: int) -> None:
    """Else each of them would compute all of it, in as much more memory; the loss stays the same.

    Of a model that knows no signs, what is left over is evaluated one sequence at a time."""
    devices, rng, got = 6, np.random.default_rng(0), list[int]()
    rows = rng.integers(0, 100, (sequences, 9)).astype(np.int32)
    if masked:
        rows[: sequences // 2, 3:] = ~rows[: sequences // 2, 3:]
        rows[0, 0] = ~rows[0, 0]  # which signs the filling has is not that of a sequence

    def loss(params: float, part: np.ndarray) -> float:
        got.append(len(part))
        return float(masked_mean(params, part) if masked else params * part[:, 1:].mean())

    model = ModelDef(lambda key: (), masked_mean, lambda name: False, masked_tokens=masked)
    place: Any = SimpleNamespace(batch_parts=devices, scope=None, turn=None)
    measure = HeldOutLoss(model, devices, placement=place)
    found = measure.losses(2.0, HeldOut(rows), batch=loss).overall
    assert found == pytest.approx(2 * rows[:, 1:][rows[:, 1:] >= 0].mean(), rel=1e-5)
    assert all(many % devices == 0 for many in got)
    assert max(got) <= max(SEQUENCES_MAX, devices)
    # A sequence at a time on each device, and so in no more memory than a step takes.
    whole, left = divmod(sequences, SEQUENCES_MAX - SEQUENCES_MAX % devices)
    assert len(got) == whole + (1 if masked else (left >= devices) + left % devices)


def test_held_out_sequences_without_a_target_are_refused() -> None:
    """The first token of a sequence is no target."""
    read = Tokens([np.full(101, ~1, np.int32)], 9, masked=True)
    with pytest.raises(ValueError, match="none of the 5 held-out sequences has a token to be pred"):
        held_out(read, 10, 5, 0)
    plain = Tokens([np.ones(101, np.uint16)], 9)
    assert targets(held_out(Mixed((read, plain), (1, 1), ("a", "b")), 10, 4, 0)) == 20


def test_the_loss_of_each_corpus_is_that_of_evaluating_it_alone() -> None:
    """And each sequence is evaluated once."""
    shapes: list[int] = []

    def loss(params: float, batch: jax.Array) -> jax.Array:
        jax.debug.callback(lambda rows: shapes.append(len(rows)), batch)
        return masked_mean(params, batch)

    model = ModelDef(lambda key: (), loss, lambda name: False, masked_tokens=True)
    rng, counts = np.random.default_rng(0), (SEQUENCES_MAX + 3, 0, 5, 2)
    rows = rng.integers(0, 100, (sum(counts), 9)).astype(np.int32)
    rows[: SEQUENCES_MAX + 3] //= 10  # another loss than the others'
    rows[-2:] = ~rows[-2:]  # nothing to be predicted
    measure = HeldOutLoss(model)
    found = measure.losses(2.0, HeldOut(rows, ("code", "none", "talk", "read"), counts))
    jax.effects_barrier()
    assert sum(shapes) == sum(counts) - 2, "nothing twice, and nothing without a target"
    assert list(found.each) == ["code", "talk"]
    assert found.each["code"] == measure(2.0, rows[: SEQUENCES_MAX + 3])
    assert found.each["talk"] == measure(2.0, rows[SEQUENCES_MAX + 3 : -2])
    assert found.overall == pytest.approx(measure(2.0, rows), rel=1e-6)
    assert measure.losses(2.0, HeldOut(rows)).each == {}, "one corpus has no others"


def test_the_loss_of_a_mixture_is_of_its_shares_where_little_of_a_corpus_is_held_out() -> None:
    """It is trained on again and again; so each of its tokens counts as often."""
    parts = [{"source": name, "weight": w} for name, w in (("code", 7), ("prose", 3))]
    spec = a_run(data={"mixture": parts}, evaluation={"sequences": 100})
    code, prose = (Tokens([np.full(10 * n + 1, t, np.uint16)], 99) for n, t in ((20, 2), (50, 6)))
    held = held_out_of(spec, Mixed((code, prose), (7, 3), ("x", "y")))
    assert held.counts == (20, 30) and held.told == "20 of code (which count as 70), 30 of prose"
    measure = HeldOutLoss(ModelDef(lambda key: (), masked_mean, lambda name: False))
    found = measure.losses(1.0, held)
    assert found.each == {"code": 2.0, "prose": 6.0}
    assert found.overall == pytest.approx(0.7 * 2 + 0.3 * 6)
    enough = held_out_of(spec, Mixed((prose, prose), (1, 1), ("x", "y")))
    assert enough.times == [1.0, 1.0], "to the last bit what it was"
    assert enough.told == "50 of code, 50 of prose"


def test_an_evaluation_that_nobody_wants_ends_between_two_batches() -> None:
    model = ModelDef(lambda key: (), masked_mean, lambda name: False)
    rows, asked = np.ones((3 * SEQUENCES_MAX, 5), np.int32), iter([True, True, False])
    with pytest.raises(Unwanted):
        HeldOutLoss(model).losses(2.0, HeldOut(rows), lambda: next(asked))
    assert next(asked, None) is None


def a_run(**fields: object) -> RunSpec:
    body = {"name": "r", "budget": {"steps": 1}, "model": {"context_tokens": 10}}
    return RunSpec.model_validate(body | fields)


def test_a_mixture_is_held_out_corpus_by_corpus_under_the_names_of_its_sources() -> None:
    parts = [{"source": f"texts/{name}", "weight": w} for name, w in (("code", 3), ("talk", 1))]
    spec = a_run(data={"mixture": parts}, evaluation={"sequences": 8})
    tokens = [Tokens([np.arange(1001, dtype=np.uint16) + n], 5000) for n in (0, 2000)]
    held = held_out_of(spec, Mixed(tuple(tokens), (3, 1), ("x", "y")))
    assert (held.names, held.counts) == (("code", "talk"), (6, 2))
    code, talk = held.parts
    assert code.shape == (6, 11) and code.max() < 2000 <= talk.min()
    alone = held_out_of(a_run(evaluation={"sequences": 8}), TOKENS)
    assert (alone.names, len(alone.parts)) == ((), 1)


def test_corpora_with_like_names_are_told_apart() -> None:
    def names(*sources: str) -> tuple[str, ...]:
        return corpus_names(
            Data.model_validate({"mixture": [{"source": s, "weight": 1} for s in sources]})
        )

    assert names("a/text", "b/text", "stdlib") == ("a/text", "b/text", "stdlib")
    assert names("a/text", "code", "a/text") == ("text (1)", "code", "text (2)")


def test_tokens_say_how_many_sequences_are_evaluated() -> None:
    assert len(held_out_of(a_run(evaluation={"tokens": 209}), TOKENS).sequences_SxL1) == 20
    assert len(held_out_of(a_run(evaluation={"tokens": 3}), TOKENS).sequences_SxL1) == 1


# Sets up JAX as a learner with one thread does, takes steps as its train loop does, and evaluates
# beside them. Says how many steps were taken until the evaluation was over, at most STEPS.
BESIDE = """
import os, sys, threading
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
import diloco_learner.__main__ as learner
from diloco_learner.settings import Settings

learner._set_up_jax(Settings(threads=1, cache=sys.argv[1]))
import jax, jax.numpy as jnp

STEPS = int(sys.argv[2])
square = jnp.full((256, 256), 1 / 256)
over = threading.Event()
begun = threading.Event()
taken = []

@jax.jit
def step(x):
    for _ in range(20):
        x = jnp.tanh(x @ square)
    return x, x.sum()

def train():
    x, before = step(square)
    while not over.is_set() and len(taken) < STEPS:
        x, loss = step(x)
        float(before)  # read while the next one is computed
        before = loss
        taken.append(1)
        begun.set()
    over.set()

evaluate = jax.jit(lambda x: jnp.sin(x @ square).sum()).lower(square).compile()
thread = threading.Thread(target=train)
thread.start()
begun.wait()
for _ in range(3):
    float(evaluate(square))
    if over.is_set():
        break
over.set()
thread.join()
print(len(taken))
"""
STEPS_BESIDE_MAX = 1000


def test_an_evaluation_beside_training_has_its_turn_on_one_thread(tmp_path: Path) -> None:
    """With a pool of one thread, each step that is asked for would be computed before it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, "-c", BESIDE, str(tmp_path), str(STEPS_BESIDE_MAX)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < STEPS_BESIDE_MAX
