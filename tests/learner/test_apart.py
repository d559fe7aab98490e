"""Documents of one sequence that are kept apart: each is computed as if it stood alone."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from shared.corpora.conversations import LINES, chat_of, lines_of, said
from shared.corpora.texts import folder_of, prepared

from diloco_learner.data.cache import CorpusCache
from diloco_learner.data.corpus import load, separator_of
from diloco_learner.models import attention, build, transformer
from diloco_learner.models.attention import documents
from diloco_learner.training.computing_io import OnThisMachine
from diloco_learner.training.data_parallel import train_data_parallel
from diloco_learner.training.trainer import Program
from diloco_shared.corpora.chat import Chat
from diloco_shared.corpora.prepare import prepare
from diloco_shared.corpora.sources import find
from diloco_shared.corpora.templates import template_of
from diloco_shared.corpora.tokenizers import ByteTokenizer
from diloco_shared.reach.local import Factories, Reach
from diloco_shared.spec.run import Data, Model, RunSpec
from diloco_shared.spec.shapes import Shape

END = 7
# Grouped heads.
TINY = Shape(vocabulary=60, width=16, layers=2, heads=4, kv_heads=2, head_width=4, hidden=24)
LOCAL = replace(TINY, window=4)
SHAPES = {
    "all": TINY,
    "a key for each query": replace(TINY, kv_heads=4),
    "windows": LOCAL,
    "windows and all": replace(LOCAL, global_every=2, local_rope_base=100.0),
    "a loop over layers": replace(LOCAL, layers=6, global_every=3, remat="layer"),
    "slowed turns": replace(
        TINY, rope_scaling="llama3", rope_factor=8.0, rope_original=8, remat="products"
    ),
    "capped": replace(LOCAL, attention_cap=5.0),
}


def words(count: int, least: int, seed: int = 0) -> np.ndarray:
    """Two rows of tokens from `least` on, none of which ends a document."""
    return np.random.default_rng(seed).integers(least, least + 20, (2, count)).astype(np.int32)


@cache
def parameters(shape: Shape) -> Any:
    return jax.jit(partial(transformer.init, shape))(jax.random.key(1))


def logits(shape: Shape, tokens: np.ndarray, separator: int | None) -> np.ndarray:
    function = jax.jit(partial(transformer.forward, shape, jnp.float32, separator=separator))
    return np.asarray(function(parameters(shape), tokens))


@cache
def alone(shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """Logits of both documents, each in sequences of its own, which nothing keeps apart."""
    found = logits(shape, np.concatenate([FIRST, SECOND_ALONE]), None)
    return found[:2], found[2:]


FIRST, SECOND = words(10, 10), words(9, 35, seed=1)
ENDS = np.full((2, 1), END, np.int32)
SECOND_ALONE = np.concatenate([ENDS, SECOND], axis=1)
BOTH = np.concatenate([FIRST, SECOND_ALONE], axis=1)


def test_a_separator_opens_a_document_whatever_its_sign() -> None:
    row = np.array([[END, 1, 2, ~END, ~3, 4, END, END, 5], [1, 2, 3, 4, 5, 6, 8, 9, ~END]])
    found = documents(jnp.asarray(row, jnp.int32), END)
    assert found.tolist() == [[1, 1, 1, 2, 2, 2, 3, 4, 4], [0, 0, 0, 0, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize("name", SHAPES)
def test_packed_documents_have_the_logits_of_each_alone(name: str) -> None:
    wanted = np.concatenate(alone(SHAPES[name]), axis=1)
    np.testing.assert_allclose(logits(SHAPES[name], BOTH, END), wanted, rtol=1e-5, atol=1e-5)


def test_the_loss_is_that_of_the_documents_alone() -> None:
    """No token is left out: a first one is predicted from the separator and nothing else."""
    log_p = np.asarray(jax.nn.log_softmax(np.concatenate(alone(TINY), axis=1)))
    nats = -np.take_along_axis(log_p[:, :-1], BOTH[:, 1:, None], axis=-1)
    loss = jax.jit(partial(transformer.loss, TINY, jnp.float32, separator=END))
    assert float(loss(parameters(TINY), BOTH)) == pytest.approx(nats.mean(), rel=1e-5)


def test_no_document_has_a_gradient_from_the_other() -> None:
    """Of the loss of one by the embeddings of the other's tokens: exactly zero."""

    def slopes(separator: int | None, *rows: np.ndarray) -> list[np.ndarray]:
        """The steepest of each token's embedding, (V,)."""
        loss = partial(transformer.loss, LOCAL, jnp.float32, separator=separator)
        gradient = jax.jit(jax.grad(loss))
        found = [gradient(parameters(LOCAL), tokens)["embedding"]["tokens_VxD"] for tokens in rows]
        return [np.abs(np.asarray(each)).max(axis=1) for each in found]

    of_first = np.concatenate([FIRST, ENDS, ~SECOND], axis=1)
    of_second = np.concatenate([~FIRST, ~ENDS, SECOND], axis=1)
    (mixed,) = slopes(None, of_second)
    assert mixed[FIRST[:, 8:]].min() > 0, "they see each other where they are not kept apart"
    first, second = slopes(END, of_first, of_second)
    assert first[FIRST].min() > 0 and not first[SECOND].any() and first[END] == 0
    assert second[SECOND[:, :-1]].min() > 0 and not second[FIRST].any() and second[END] > 0


@pytest.mark.parametrize(("length", "used"), [(20, {("cudnn", None)}), (19, set())])
def test_cudnn_gets_a_mask_with_the_window_in_it_and_only_even_lengths(
    length: int, used: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no cuDNN here: what it would get is computed by XLA."""
    asked: list[tuple[Any, Any]] = []
    plain = jax.nn.dot_product_attention

    def recorded(*arrays: Any, **options: Any) -> Any:
        asked.append((options["implementation"], options["local_window_size"]))
        assert options["mask"].shape == (2, 1, length, length) and options["is_causal"]
        return plain(*arrays, **options | {"implementation": "xla"})

    tokens = BOTH[:, -length:]
    wanted = logits(LOCAL, tokens, END)
    monkeypatch.setattr(attention, "implementation", lambda *_: "cudnn")
    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    found = logits(LOCAL, tokens, END)
    assert set(asked) == used, "what cuDNN does not compute, our own operations do"
    np.testing.assert_allclose(found, wanted, atol=1e-6)


def test_cudnn_gets_the_window_itself_where_no_documents_are_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A window of w tokens is the token itself and w - 1 before it, there as here."""
    windows: list[Any] = []
    plain = jax.nn.dot_product_attention

    def recorded(*arrays: Any, **options: Any) -> Any:
        windows.append(options["local_window_size"])
        assert options["mask"] is None
        return plain(*arrays, **options | {"implementation": "xla"})

    wanted = logits(LOCAL, BOTH, None)
    monkeypatch.setattr(attention, "implementation", lambda *_: "cudnn")
    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    np.testing.assert_allclose(logits(LOCAL, BOTH, None), wanted, atol=1e-6)
    assert (LOCAL.window - 1, 0) in windows


def test_where_nothing_is_kept_apart_nothing_is_computed_for_it() -> None:
    def program(separator: int | None) -> str:
        model = build(Model(preset="nano"), separator)
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        return str(jax.make_jaxpr(model.loss)(shapes, jax.ShapeDtypeStruct((2, 9), np.int32)))

    assert "cumsum" in program(0) and "cumsum" not in program(None)


# --------------------------------------------------------------------------------------------------
# Which token is between the documents of a corpus.


def apart(source: Path | str, **more: Any) -> Data:
    given = {"source": str(source), "documents": "apart", "validation_fraction": 0.2}
    return Data.model_validate(given | more)


def separator(data: Data, root: Path) -> int | None:
    return separator_of(data, load(data, root, CorpusCache(root / "cache")))


def numbers(root: Path, name: str, beside: str = "") -> str:
    """Tokens that somebody else made."""
    (np.arange(5000, dtype=np.uint16) % 200).tofile(root / f"{name}.bin")
    if beside:
        (root / f"{name}.json").write_text(beside)
    return f"{name}.bin"


def test_a_corpus_says_what_ends_its_documents(tmp_path: Path) -> None:
    prepared(folder_of(tmp_path / "text", 60), tmp_path / "corpus")
    theirs = numbers(tmp_path, "t", '{"vocabulary": 200, "end_of_document": 3}')
    assert separator(apart("corpus"), tmp_path) == 0
    assert separator(apart("text"), tmp_path) == 0
    assert separator(apart(theirs), tmp_path) == 3
    assert separator(apart(theirs, documents="packed"), tmp_path) is None
    mixture = [{"source": "corpus", "weight": 1}, {"source": "text", "weight": 1}]
    assert separator(apart("", mixture=mixture), tmp_path) == 0


def test_what_does_not_tell_documents_apart_is_refused(tmp_path: Path) -> None:
    prepared(folder_of(tmp_path / "text", 60), tmp_path / "corpus")
    silent = numbers(tmp_path, "silent", '{"vocabulary": 200}')
    with pytest.raises(
        ValueError,
        match=r'not say which it is: write {"end_of_document": N} to .*'
        r"silent\.json",
    ):
        separator(apart(silent), tmp_path)
    beyond = numbers(tmp_path, "beyond", '{"vocabulary": 200, "end_of_document": 200}')
    with pytest.raises(ValueError, match=r"token 200 ends a document, and there are 200 tokens"):
        separator(apart(beyond), tmp_path)
    other = numbers(tmp_path, "other", '{"vocabulary": 200, "end_of_document": 3}')
    mixture = [{"source": name, "weight": 1} for name in ("corpus", other)]
    with pytest.raises(ValueError, match=r"it is 0 in .*corpus, and 3 in .*other\.bin"):
        separator(apart("", mixture=mixture), tmp_path)
    # What nobody asks for is not refused.
    assert separator(apart(silent, documents="packed"), tmp_path) is None


def test_conversations_that_the_token_would_cut_are_refused(tmp_path: Path) -> None:
    """The built-in template ends each answer with it; one like ChatML ends messages otherwise."""
    talks = {
        "one": [said(f"what is {n}?", f"{n}") for n in range(60)],
        "two": [said(f"what is {n}?", f"{n}", "why?", "so it is") for n in range(60)],
    }
    ours, lines = Chat(template_of(ByteTokenizer(), "bytes")), chat_of(LINES)
    for name, turns in talks.items():
        source = lines_of(tmp_path / f"{name}.jsonl", [{"messages": talk} for talk in turns])
        for manner, chat in (("ours", ours), ("lines", lines)):
            prepare(
                find(str(source), chat=chat), ByteTokenizer(), tmp_path / f"{name}-{manner}", 0.2
            )
    for folder in ("one-ours", "one-lines", "two-lines"):
        assert separator(apart(folder), tmp_path) == 0
    with pytest.raises(
        ValueError,
        match=r"would cut conversations of .*two-ours into pieces: "
        r"token 0 .* in the \d+ conversations of validation-00000\.bin",
    ):
        separator(apart("two-ours"), tmp_path)


# --------------------------------------------------------------------------------------------------
# Through a learner.


def spec(source: Path | str, **changed: Any) -> RunSpec:
    shape = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_width": 8, "hidden": 16}
    tables: dict[str, Any] = {
        "name": "r",
        "algorithm": {"fragments": 2, "sync_every_steps": 6, "overlap_steps": 2},
        "model": {"context_tokens": 32, "overrides": shape},
        "data": {"source": str(source), "documents": "apart", "virtual_shards": 4},
        "inner": {"batch_sequences": 4, "accumulation": 2, "warmup_steps": 0},
        "evaluation": {"sequences": 16},
        "budget": {"steps": 6},
    }
    return RunSpec.model_validate(
        {
            name: table | changed.get(name, {}) if isinstance(table, dict) else table
            for name, table in tables.items()
        }
    )


@pytest.mark.whole
def test_a_learner_trains_on_documents_kept_apart(tmp_path: Path) -> None:
    prepared(folder_of(tmp_path / "text", 200, words=1), tmp_path / "corpus")
    learner = OnThisMachine(Reach(tmp_path), CorpusCache(tmp_path / "cache"))
    built = learner.build(spec(tmp_path / "corpus"))
    trainer = built.trainer
    program = trainer.program
    tokens = built.held_out.sequences_SxL1
    assert (tokens == 0).sum(axis=1).min() >= 2, "several documents in each sequence"
    packed = Program.build(spec(tmp_path / "corpus", data={"documents": "packed"}))
    both = [p.evaluate(trainer.params, tokens) for p in (program, packed)]
    assert abs(both[0] - both[1]) > 1e-4
    losses = [float(trainer.step(tokens[:8], 0.01)) for _ in range(6)]
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


@pytest.mark.whole
def test_the_reference_trains_on_documents_kept_apart(tmp_path: Path) -> None:
    prepared(folder_of(tmp_path / "text", 200, words=1), tmp_path / "corpus")
    losses = [
        train_data_parallel(spec(tmp_path / "corpus", data={"documents": how}), 2)["val_loss"]
        for how in ("apart", "packed")
    ]
    assert np.isfinite(losses).all() and losses[0] != losses[1]


def test_a_model_of_ones_own_decides_by_itself(tmp_path: Path) -> None:
    prepared(folder_of(tmp_path / "text", 60), tmp_path / "corpus")
    reach = Reach(tmp_path, Factories.of("own"))
    learner = OnThisMachine(reach, CorpusCache(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"own:model\) attends to is decided by that model"):
        learner.build(spec(tmp_path / "corpus", model={"factory": "own:model"}))
