"""What bench/awaiting.py counts: lines of async functions, and those that wait."""

import asyncio
from functools import cache
from pathlib import Path

import awaiting
import coverage
import pytest

SOURCE = '''\
import asyncio


async def never(n):
    """Nobody calls it."""
    x: int
    await asyncio.sleep(
        n
    )


async def called(n):
    async def inner():
        return await asyncio.sleep(0)

    def plain():
        return n

    async with asyncio.timeout(1):
        if n:
            await inner()
        else:
            plain()


def of_no_interest():
    return 1
'''


product_read_once = cache(awaiting.product)


def product(tmp_path: Path) -> tuple[Path, list[awaiting.Function]]:
    path = tmp_path / "awaited.py"
    path.write_text(SOURCE, encoding="utf-8")
    _, statements, _, _, _ = coverage.Coverage(data_file=None).analysis2(str(path))
    return path, awaiting.functions(SOURCE, statements)


def test_lines_that_await_are_found(tmp_path: Path) -> None:
    _, found = product(tmp_path)
    assert {f.name: (sorted(f.lines), sorted(f.waits)) for f in found} == {
        "never": ([7], [7]),
        "called": ([13, 16, 17, 19, 20, 21, 23], [19, 21]),
        "called.inner": ([14], [14]),
    }


def test_what_was_executed_is_told_from_what_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found = product(tmp_path)
    monkeypatch.setattr(awaiting, "ROOT", tmp_path)
    namespace: dict[str, object] = {}
    exec(compile(SOURCE, str(path), "exec"), namespace)

    def play() -> str:
        asyncio.run(namespace["called"](1))  # type: ignore[operator]
        return "played"

    result, executed = awaiting.measured(play, [path.name])
    assert result == "played"
    shown = awaiting.result_of({path.name: found}, executed)
    assert shown["without_sockets"] == shown["all"] == shown["files"][path.name]
    assert (shown["all"]["lines"], shown["all"]["executed"]) == (9, 6)
    assert (shown["all"]["waits"], shown["all"]["waited"]) == (4, 3)
    assert [(f["function"], f["missing"]) for f in shown["missing"]] == [
        (f"{path.name}:called", [17, 23]),
        (f"{path.name}:never", [7]),
    ]


def test_every_place_of_the_product_has_something_that_awaits() -> None:
    files = product_read_once()
    assert all(any(f.startswith(place) for f in files) for place in awaiting.PLACES)
    assert any(awaiting.speaks_to_sockets(f) for f in files)


def test_what_starts_a_process_is_there_and_listed_with_its_reason() -> None:
    files = product_read_once()
    there = {f"{file}:{f.name}" for file, functions in files.items() for f in functions}
    assert set(awaiting.STARTERS) <= there, "renamed or gone"
    nothing = {file: set[int]() for file in files}
    shown = awaiting.result_of(files, nothing)
    apart = sum(starter["lines"] for starter in shown["starters"].values())
    assert 0 < apart < 0.05 * shown["without_sockets"]["lines"], "a few, not a way out"
    assert shown["without_starters"]["lines"] == shown["without_sockets"]["lines"] - apart
