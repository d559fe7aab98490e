"""Figures of files, put together by folder of the product, as tables for the documentation."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath


def folder(file: str) -> str:
    """Which part of the product a file is in, such as `syncer/rounds` or `shared/bus/nats`."""
    parts = PurePosixPath(file).parts
    package = next(part for part in parts if part.startswith("diloco_"))
    inner = parts[parts.index(package) + 1 : -1]
    return "/".join((package.removeprefix("diloco_"), *inner))


def by_folder(files: Iterable[tuple[str, Sequence[int]]]) -> Mapping[str, list[int]]:
    """Sums of the figures of each file, by folder, in the order of their names."""
    found: dict[str, list[int]] = {}
    for file, figures in files:
        sums = found.setdefault(folder(file), [0] * len(figures))
        sums[:] = [total + figure for total, figure in zip(sums, figures, strict=True)]
    return dict(sorted(found.items()))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, without a line's end behind it."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def percent(part: int, whole: int, digits: int = 0) -> str:
    """As pages write it; a whole of nothing is complete."""
    return f"{100 * part / whole if whole else 100:.{digits}f} %"
