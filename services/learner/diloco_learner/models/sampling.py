"""Text from a model in a folder: a Hugging Face checkpoint with its tokenizer."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from diloco_learner.models import filled, transformer
from diloco_learner.models.decoding import Sampler, Sampling
from diloco_shared.corpora.tokenizers import Tokenizer, load
from diloco_shared.hf.weights import open_weights

# What a decoder shows of a character that is not whole yet.
NOT_WHOLE = "\ufffd"


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
        drawn = self.sampler.tokens(begins, tokens, seed, end)

        def pieces() -> Iterator[str]:
            found: list[int] = []
            shown = ""
            for token in drawn:
                found.append(token)
                whole = self.tokenizer.decode(found)
                # Of a character of several tokens nothing is shown before its last one.
                ready = whole.rstrip(NOT_WHOLE)
                if len(ready) > len(shown) and ready.startswith(shown):
                    yield ready[len(shown) :]
                    shown = ready
            rest = self.tokenizer.decode(found)
            if rest.startswith(shown) and len(rest) > len(shown):
                yield rest[len(shown) :]

        return pieces()


def writer(folder: Path, how: Sampling) -> Writer:
    """The model in a folder. Raises ValueError for what is no checkpoint, or has no tokenizer."""
    weights = open_weights(folder)
    tokenizer = load(str(folder.absolute()))
    shape = weights.shape
    if tokenizer.vocabulary > shape.vocabulary:
        raise ValueError(
            f"{folder}: the tokenizer has {tokenizer.vocabulary} tokens, and the model "
            f"{shape.vocabulary}: they do not belong together"
        )
    shapes = jax.eval_shape(partial(transformer.init, shape), jax.random.key(0))
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return Writer(Sampler(shape, filled(shapes, "layers", weights.read), dtype, how), tokenizer)
