"""A corpus that says which tokens are to be predicted, all the way through a learner."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared.corpora.conversations import lines_of, said
from shared.corpora.texts import folder_of, prepared

from diloco_learner.data.cache import CorpusCache
from diloco_learner.data.corpus import check_signs, load
from diloco_learner.data.shards import ShardReader, cut_of
from diloco_learner.models import ModelDef, build, transformer
from diloco_learner.models.cross_entropy import summed
from diloco_learner.models.transformer import Shape
from diloco_learner.training.computing_io import OnThisMachine
from diloco_learner.training.evaluate import held_out
from diloco_learner.training.inner import make_step, optimizer
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.corpora.chat import Chat
from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.prepared import Corpus
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.templates import template_of
from diloco_shared.corpora.tokenizers import ByteTokenizer
from diloco_shared.reach.local import Factories, Reach
from diloco_shared.spec.run import Data, Inner, RunSpec

TINY = Shape(vocabulary=50, width=16, layers=1, heads=4, kv_heads=2, head_width=4, hidden=24)
SHAPE = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_width": 8, "hidden": 16}


def model() -> ModelDef:
    return ModelDef(
        partial(transformer.init, TINY),
        partial(transformer.loss, TINY, jnp.float32),
        lambda name: name.startswith("embedding/"),
        "layers",
        masked_tokens=True,
    )


def batch(seed: int = 0, share: float = 0.4, rows: int = 4) -> np.ndarray:
    """Tokens of which about a share is to be predicted; less in the first rows."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, TINY.vocabulary, (rows, 11)).astype(np.int32)
    shares = np.linspace(share / 4, share, rows)[:, None]
    return np.where(rng.random(tokens.shape) < shares, tokens, ~tokens)


def conversations(to: Path, source: Path) -> Corpus:
    chat = Chat(template_of(ByteTokenizer(), "bytes"))
    return prepare(find(str(source), chat=chat), ByteTokenizer(), to, 0.2)


@pytest.fixture(scope="module")
def polite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nobody can guess what the user says, and anybody what the assistant does."""
    root, rng = tmp_path_factory.mktemp("polite"), np.random.default_rng(0)
    asked = ["".join(map(chr, rng.integers(65, 91, 12))) for _ in range(200)]
    source = lines_of(root / "c.jsonl", [{"messages": said(text, "so it is.")} for text in asked])
    conversations(root / "corpus", source)
    return root / "corpus"


def spec(source: Path | str, **model: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "r",
            "seed": 3,
            "algorithm": {"fragments": 2, "sync_every_steps": 6, "overlap_steps": 2},
            "model": {"context_tokens": 32, "overrides": SHAPE} | model,
            "data": {"source": str(source), "virtual_shards": 4},
            "inner": {"batch_sequences": 8, "warmup_steps": 0},
            "budget": {"steps": 10},
        }
    )


def test_the_loss_is_the_mean_over_the_targets_and_so_is_its_gradient() -> None:
    params, tokens = jax.jit(model().init)(jax.random.key(1)), batch()

    def by_hand(params: Any) -> jax.Array:
        read = np.where(tokens < 0, ~tokens, tokens)
        logits = transformer.forward(TINY, jnp.float32, params, read[:, :-1])
        picked = [
            jax.nn.log_softmax(logits[b, i])[tokens[b, i + 1]]
            for b in range(len(tokens))
            for i in range(10)
            if tokens[b, i + 1] >= 0
        ]
        return -jnp.mean(jnp.stack(picked))

    found = jax.jit(jax.value_and_grad(model().loss))(params, tokens)
    wanted = jax.jit(jax.value_and_grad(by_hand))(params)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-6)


def test_what_is_not_to_be_predicted_gives_no_gradient() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 4)).astype(np.float32)
    head = rng.standard_normal((4, 9)).astype(np.float32)
    targets = np.array([3, ~3, 0, ~0, ~8, 8], np.int32)
    slope = np.asarray(jax.grad(lambda x: summed(x, head, targets, False, 0.0)[0])(x))
    assert (np.abs(slope).max(axis=1) > 0).tolist() == (targets >= 0).tolist()
    # Which token it would have been makes no difference: the last one of a row is never read.
    tokens, other = batch(), batch()
    tokens[:, -1], other[:, -1] = ~3, ~7
    params = jax.jit(model().init)(jax.random.key(1))
    a, b = (jax.jit(jax.value_and_grad(model().loss))(params, each) for each in (tokens, other))
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_without_a_target_is_a_step_that_moves_nothing(accumulation: int) -> None:
    inner = Inner(optimizer="sgd", accumulation=accumulation)
    params = jax.jit(model().init)(jax.random.key(1))
    before = jax.tree.map(np.array, params)
    state = optimizer(inner, model().is_embedding, "layers").init(params)
    read = np.full((4, 11), ~7, np.int32)
    after, _, loss = make_step(model(), inner)(params, state, read, 0.1)
    assert float(loss) == 0.0
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, after))


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    """Though its parts have more and fewer targets."""
    found = []
    for accumulation in (1, 2, 4):
        inner = Inner(optimizer="sgd", accumulation=accumulation, clip_norm=1e9)
        params = jax.jit(model().init)(jax.random.key(1))
        state = optimizer(inner, model().is_embedding, "layers").init(params)
        new, _, loss = make_step(model(), inner)(params, state, batch(), 1.0)
        found.append([float(loss), *map(np.asarray, jax.tree.leaves(new))])
    for parts in found[1:]:
        for a, b in zip(found[0], parts, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_windows_have_the_signs_and_cut_conversations_as_they_cut_text(polite: Path) -> None:
    corpus = load(Data(source=str(polite)))
    assert isinstance(corpus, Corpus) and corpus.masked
    cut = cut_of(corpus.train, 2, 16, seed=1)
    rows = ShardReader(cut, 0).take(cut.sequences_per_shard)
    assert rows.dtype == np.int32 and (rows < 0).any(axis=1).all()
    answers = b"".join(bytes(row[row >= 0].tolist()) for row in rows)
    assert set(answers.decode()) == set("so it is.\0")
    whole = corpus.train[:]
    assert any((whole[i : i + 17] == rows[0]).all() for i in range(0, len(whole) - 16, 16))


def test_masked_and_plain_corpora_may_be_mixed(polite: Path, tmp_path: Path) -> None:
    prepared(folder_of(tmp_path / "text", 60), tmp_path / "plain")
    parts = [{"source": str(polite), "weight": 1}, {"source": str(tmp_path / "plain"), "weight": 1}]
    mixture = load(Data.model_validate({"mixture": parts}))
    cut = cut_of(mixture.train, 2, 16, seed=1)
    rows = ShardReader(cut, 0).take(20)
    assert (rows < 0).any(axis=1).sum() == 10
    assert len(held_out(mixture.validation, 16, 8, 0)) == 8
    with pytest.raises(ValueError, match=f"the corpus {polite} says which tokens"):
        check_signs(spec(polite), ModelDef(len, max, bool), mixture)  # type: ignore[arg-type]


def test_a_model_of_ones_own_that_knows_no_signs_is_refused(
    polite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own: Any = ModuleType("own_models")

    class Plain:
        """As the built-in one, but that it says nothing of signs."""

        def __init__(self, config: Any) -> None:
            plain = build(config.model_copy(update={"factory": None}))
            self.init, self.loss = plain.init, plain.loss

    class Signs(Plain):
        masked_tokens = True

    own.Plain, own.Signs = Plain, Signs
    monkeypatch.setitem(sys.modules, "own_models", own)
    reach = Reach(tmp_path, Factories.of("own_models"))
    learner = OnThisMachine(reach, CorpusCache(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"own_models:Plain.* set masked_tokens = True on"):
        learner.build(spec(polite, factory="own_models:Plain"))
    # What was refused is read anew the next time, as a mended file would be.
    monkeypatch.setitem(sys.modules, "own_models", own)
    built = learner.build(spec(polite, factory="own_models:Signs"))
    assert (built.held_out.sequences_SxL1 < 0).any()


@pytest.mark.whole
def test_fine_tuning_learns_the_answers_and_nothing_of_the_questions(polite: Path) -> None:
    run = spec(polite)
    corpus = load(run.data)
    program = Program.build(run)
    trainer = Trainer(program)
    cut = cut_of(corpus.train, run.data.virtual_shards, run.model.context_tokens, run.seed)
    validation = held_out(corpus.validation, run.model.context_tokens, 64, run.seed)

    def losses() -> tuple[float, float]:
        """Of the answers, and of all else."""
        found = [program.evaluate(trainer.params, tokens) for tokens in (validation, ~validation)]
        return found[0], found[1]

    before = losses()
    readers = [ShardReader(cut, 0, passes=n) for n in range(20)]
    for reader in readers:
        while len(tokens := reader.take(8)) == 8:
            assert np.isfinite(float(trainer.step(tokens, 0.01)))
    after = losses()
    assert after[0] < 0.2 < 4 < before[0]
    assert after[1] > before[1], "what is never right is made less likely everywhere"
