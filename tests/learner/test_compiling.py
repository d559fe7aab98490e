"""Of those that want one program at once, one compiles it, and nobody waits for who hangs."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import pytest
from filelock import FileLock

from diloco_learner.training import compiling
from diloco_learner.training.compiling import compiled

BEAT_S = 0.02


class Program:
    """As `jax.jit(...).lower(...)` gives it; it is compiled when the test says so."""

    def __init__(self, text: str = "module @jit_step", *, at_once: bool = True) -> None:
        self.text = text
        self.began, self.may_end = threading.Event(), threading.Event()
        if at_once:
            self.may_end.set()

    def as_text(self) -> str:
        return self.text

    def compile(self) -> str:
        self.began.set()
        assert self.may_end.wait(30)
        return self.text


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of compiled programs."""
    monkeypatch.setattr(compiling, "BEAT_S", BEAT_S)
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as others:
        yield others


def begun(others: ThreadPoolExecutor, program: Program) -> "Future[str]":
    future = others.submit(compiled, program)
    assert program.began.wait(30)
    return future


def waits(program: Program) -> bool:
    """For longer than one that hangs would be waited for."""
    return not program.began.wait(BEAT_S * compiling.BEATS_MISSED * 2)


def test_one_compiles_and_the_others_go_on_together_when_it_is_done(
    folder: Path, others: ThreadPoolExecutor
) -> None:
    first, second, third = Program(at_once=False), Program(at_once=False), Program(at_once=False)
    one = begun(others, first)
    more = [others.submit(compiled, program) for program in (second, third)]
    assert waits(second) and waits(third)
    first.may_end.set()
    assert one.result(30) == first.text
    # They read the program. If it is not there, they do not compile it one after the other.
    assert second.began.wait(30) and third.began.wait(30)
    for program in (second, third):
        program.may_end.set()
    assert [future.result(30) for future in more] == [first.text] * 2


def test_another_program_waits_for_nothing(folder: Path, others: ThreadPoolExecutor) -> None:
    first = Program(at_once=False)
    one = begun(others, first)
    assert compiled(Program("module @jit_adopt")) == "module @jit_adopt"
    first.may_end.set()
    one.result(30)


def test_who_fails_to_compile_keeps_nobody_waiting(folder: Path) -> None:
    class Wrong(Program):
        def compile(self) -> str:
            raise ValueError("no such operation")

    with pytest.raises(ValueError, match="no such operation"):
        compiled(Wrong())
    assert compiled(Program())


@pytest.mark.timeout(20)
def test_who_hangs_is_waited_for_no_longer(folder: Path) -> None:
    """As a stopped process, which keeps its lock and shows nothing."""
    lock = compiling._lock_of(Program())
    assert lock is not None
    with FileLock(lock):
        assert compiled(Program())


def test_a_folder_that_is_gone_hinders_nobody(folder: Path) -> None:
    folder.rmdir()
    folder.write_text("a file")
    assert compiled(Program())


def test_among_several_hosts_all_compile_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They need each other for it."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert compiling._lock_of(Program()) is None


def test_nothing_is_locked_where_nothing_is_kept(folder: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", None)
    assert compiling._lock_of(Program()) is None
    assert compiled(Program()) and not list(folder.iterdir())
