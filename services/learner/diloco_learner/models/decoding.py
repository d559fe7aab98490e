"""Sampling text from a model of the decoder family, a token at a time.

Keys and values of what was read stay in a cache, so that a token costs one pass of one token. The
prompt is read some tokens at a time: two programs serve every prompt, however long.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diloco_learner.models import filled, transformer
from diloco_learner.models.attention import mixed, rotary_tables, seen
from diloco_learner.models.transformer import embedded, joined, logits, mlp, norm, projected
from diloco_shared.corpora.chat import Chat, closing_token
from diloco_shared.corpora.templates import ChatTemplate, template_of
from diloco_shared.corpora.tokenizers import Tokenizer, load, rows_for_text
from diloco_shared.hf.weights import open_weights
from diloco_shared.spec.shapes import Shape

# Tokens of a prompt read at once; the last part is filled up.
READ_AT_ONCE = 64


class KeyValueCache(NamedTuple):
    """Keys and values of all layers: (N, B, L, G, K)."""

    keys: jax.Array
    values: jax.Array


def empty(shape: Shape, dtype: Any, batch: int, length: int) -> KeyValueCache:
    """Room for `length` tokens."""
    size = (shape.layers, batch, length, shape.kv_heads, shape.head_width)
    return KeyValueCache(jnp.zeros(size, dtype), jnp.zeros(size, dtype))


def extend(
    shape: Shape, params: Any, cache: KeyValueCache, tokens_BxT: jax.Array, start: Any, last: Any
) -> tuple[jax.Array, KeyValueCache]:
    """Read tokens at the places from `start` on: (fp32 logits (B, V) after token `last`, cache).

    What stands behind `last` is room that later tokens take.
    """
    length = tokens_BxT.shape[1]
    rotary = rotary_tables(shape, length, start)
    places_T, places_L = start + jnp.arange(length), jnp.arange(cache.keys.shape[2])

    def block(x: jax.Array, given: Any) -> tuple[jax.Array, KeyValueCache]:
        layer, old, whole = given
        q, k, v = projected(shape, layer["attention"], x, rotary, whole)
        at = (0, start, 0, 0)
        new = KeyValueCache(
            jax.lax.dynamic_update_slice(old.keys, k, at),
            jax.lax.dynamic_update_slice(old.values, v, at),
        )
        visible = jnp.where(
            whole, seen(places_T, places_L, 0), seen(places_T, places_L, shape.window)
        )
        x = x + joined(shape, layer["attention"], mixed(shape, q, new.keys, new.values, visible))
        return x + mlp(shape, layer["mlp"], x)[0], new

    whole_N = jnp.array([shape.attends_to_all(n) for n in range(shape.layers)])
    x_BxTxD = embedded(shape, cache.keys.dtype, params, tokens_BxT)
    x_BxTxD, cache = jax.lax.scan(block, x_BxTxD, (params["layers"], cache, whole_N))
    x_BxD = jax.lax.dynamic_index_in_dim(x_BxTxD, last, axis=1, keepdims=False)
    return logits(shape, params, norm(shape, x_BxD, params["final_norm"]["scale_D"])), cache


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Temperature 0: the likeliest. `top_k` 0: of all."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature ({self.temperature:g}) must be from 0 to 100")
        if self.top_k < 0:
            raise ValueError(f"top_k ({self.top_k}) must be 0, for all tokens, or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p ({self.top_p:g}) must be above 0, and 1 at most")


def drawn(how: Sampling, tokens: int, key: jax.Array, logits_V: jax.Array) -> jax.Array:
    """One of the first `tokens`: of the likeliest that together have `top_p` of the chance, `top_k`
    at most. A model may have more rows than its tokenizer has tokens."""
    logits_V = jnp.where(jnp.arange(len(logits_V)) < tokens, logits_V, -jnp.inf)
    if how.temperature == 0:
        return jnp.argmax(logits_V)
    order_V = jnp.argsort(-logits_V)
    sorted_V = logits_V[order_V] / how.temperature
    before_V = jnp.cumsum(jax.nn.softmax(sorted_V)) - jax.nn.softmax(sorted_V)
    kept_V = before_V < how.top_p
    if how.top_k:
        kept_V &= jnp.arange(len(sorted_V)) < how.top_k
    return order_V[jax.random.categorical(key, jnp.where(kept_V, sorted_V, -jnp.inf))]


class Sampler:
    """Draws tokens from one model with its parameters; compiles when it is first used."""

    def __init__(
        self, shape: Shape, params: Any, dtype: Any, how: Sampling, vocabulary: int | None = None
    ) -> None:
        """`vocabulary`: of the tokenizer, where it is smaller than the model's."""
        # Nothing goes past an expert here: that is for many tokens at a time.
        self.shape = shape = replace(shape, expert_capacity=0.0)
        self.params = params
        self.dtype = dtype
        self._extend = jax.jit(partial(extend, shape), donate_argnums=1)
        self._drawn = jax.jit(partial(drawn, how, vocabulary or shape.vocabulary))

    def tokens(
        self, prompt: Sequence[int], count: int, seed: int, ends: Collection[int] = ()
    ) -> Iterator[int]:
        """Up to `count` tokens that follow the prompt; ends before a token that is among `ends`.

        ValueError for an empty prompt, or tokens that the model does not have.
        """
        if not prompt:
            raise ValueError("a prompt needs at least one token")
        if not 0 <= min(prompt) <= max(prompt) < self.shape.vocabulary:
            text = f"the prompt has token {max(prompt)}, the model {self.shape.vocabulary} tokens"
            raise ValueError(f"{text}: it was trained with another tokenizer")
        # In steps of what is read at once, so that prompts of about one length share programs.
        room = -(-(len(prompt) + count) // READ_AT_ONCE) * READ_AT_ONCE
        return self._tokens(np.asarray(prompt, np.int32), count, seed, frozenset(ends), room)

    def _tokens(
        self, prompt: Any, count: int, seed: int, ends: Collection[int], room: int
    ) -> Iterator[int]:
        cache = empty(self.shape, self.dtype, 1, room)
        found = None
        for start in range(0, len(prompt), READ_AT_ONCE):
            part = prompt[start : start + READ_AT_ONCE]
            padded = np.pad(part, (0, READ_AT_ONCE - len(part)))[None]
            found, cache = self._extend(self.params, cache, padded, start, len(part) - 1)
        key = jax.random.key(seed)
        for n in range(count):
            assert found is not None
            token = int(self._drawn(jax.random.fold_in(key, n), found[0]))
            if token in ends:
                return
            yield token
            if n + 1 < count:
                one = np.array([[token]], np.int32)
                found, cache = self._extend(self.params, cache, one, len(prompt) + n, 0)


# --------------------------------------------------------------------------------------------------
# From text to text: a Hugging Face checkpoint with its tokenizer.

# What a decoder shows of a character that is not whole yet, and how often at most: once for each of
# its bytes but the last, or once for them all.
NOT_WHOLE = "\ufffd"
NOT_WHOLE_MAX = 3
# Tokens that stay to be decoded together with the next: a character has four at most, and whether a
# space stands before a token is a matter of the one before it.
CONTEXT = 16
# So many at most, where no shorter context tells the same: all of them are decoded for every token.
CONTEXT_MAX = 256


def pieces(decode: Callable[[Sequence[int]], str], drawn: Iterable[int]) -> Iterator[str]:
    """The text of tokens, as it grows. Together it is that of all of them, decoded at once; but
    every token is decoded with a few others only, so that a long text takes no longer per token."""
    recent: list[int] = []
    text, shown = "", 0  # of the recent tokens, and how much of it was given
    for token in drawn:
        recent.append(token)
        text = decode(recent)
        # Of a character of several tokens nothing is shown before its last one.
        ready = max(len(text.rstrip(NOT_WHOLE)), len(text) - NOT_WHOLE_MAX)
        if ready > shown:
            yield text[shown:ready]
            shown = ready
        if len(recent) >= 2 * CONTEXT:
            rest = decode(recent[-CONTEXT:])
            alike = rest and text.endswith(rest) and len(text) - len(rest) <= shown
            if alike or len(recent) >= CONTEXT_MAX:
                del recent[:-CONTEXT]
                text, shown = rest, max(len(rest) - (len(text) - shown), 0)
    if len(text) > shown:
        yield text[shown:]


@dataclass(frozen=True, slots=True)
class Writer:
    """A sampler that takes and gives text."""

    sampler: Sampler
    tokenizer: Tokenizer

    def text(self, prompt: str, tokens: int, seed: int) -> Iterator[str]:
        """What follows the prompt, piece by piece, of up to `tokens` tokens.

        An empty prompt is the beginning of a document. ValueError for a prompt that the model
        cannot read.
        """
        end = self.tokenizer.end_of_document
        begins = [int(n) for n in self.tokenizer.encode_batch([prompt])[0]] or [end]
        return self._pieces(begins, tokens, seed, (end,))

    def answer(
        self, message: str, tokens: int, seed: int, template: ChatTemplate | None = None
    ) -> Iterator[str]:
        """What the assistant says to a user's message, piece by piece, of up to `tokens` tokens.

        `template`: other than the tokenizer's own, or the one built in where it has none. It ends
        where the document does, and before the token that ends an answer of this template. A
        template that ends answers with more than one token, as some do with plain text, leaves the
        end to the document's. ValueError for a message that the template or the model cannot take.
        """
        template = template or template_of(self.tokenizer, "beside the weights")
        before, closing = Chat(template).asked([{"role": "user", "content": message}])
        begins = [int(n) for n in self.tokenizer.encode_pieces([before])[0]]
        ends = {self.tokenizer.end_of_document}
        if (last := closing_token(self.tokenizer, closing)) is not None:
            ends.add(last)
        return self._pieces(begins, tokens, seed, tuple(sorted(ends)))

    def _pieces(
        self, begins: Sequence[int], tokens: int, seed: int, ends: Collection[int]
    ) -> Iterator[str]:
        drawn = self.sampler.tokens(begins, tokens, seed, ends)
        return pieces(self.tokenizer.decode, drawn)


def writer(folder: Path, how: Sampling) -> Writer:
    """The model in a folder. Raises ValueError for what is no checkpoint, or has no tokenizer."""
    weights = open_weights(folder)
    tokenizer = load(str(folder.absolute()))
    shape = weights.shape
    if (wanted := rows_for_text(tokenizer)) > shape.vocabulary:
        raise ValueError(
            f"{folder}: the tokenizer has {wanted} tokens, and the model "
            f"{shape.vocabulary}: they do not belong together"
        )
    shapes = jax.eval_shape(partial(transformer.init, shape), jax.random.key(0))
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    params = filled(shapes, "layers", weights.read)
    return Writer(Sampler(shape, params, dtype, how, tokenizer.vocabulary), tokenizer)
