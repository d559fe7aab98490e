"""How the transformer's tensors are called and cut in a checkpoint that other programs read.

For now every tensor keeps its name and its values, and no architecture is named.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from diloco_shared.spec.shapes import Shape, tensors

Build = Callable[[Mapping[str, NDArray[Any]]], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of the checkpoint, and how it is made.

    `sources` are the run's tensors that it needs; `build` takes exactly those, by name, as fp32
    arrays that it must not write to, and returns an array of shape `shape`: a view where one does.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    build: Build


def hf_tensors(shape: Shape, names: Iterable[str]) -> Iterator[HfTensor]:
    """Every tensor of the checkpoint of a model of this shape, in the order of the file.

    `names`: the run's tensors. Raises ValueError for a name that no model of this shape has.
    """
    sizes = {t.name: t.shape for t in tensors(shape)}
    for name in names:
        if name not in sizes:
            raise ValueError(f"a model of this shape has no tensor {name!r}")
        yield itself(name, sizes[name])


def hf_config(shape: Shape, **tokens: int | None) -> dict[str, Any] | None:
    """The content of `config.json`; None: no architecture that others know has this shape.

    `tokens`: ids of special tokens, as `eos_token_id`; None where the tokenizer has none.
    """
    return None


def itself(name: str, shape: tuple[int, ...]) -> HfTensor:
    """A tensor that is as the run has it."""
    return HfTensor(name, shape, (name,), lambda sources: sources[name])
