"""Compiled programs on disk: kept for the next process, within a limit, and never in the way."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest
from jax._src.lru_cache import LRUCache

import diloco_learner.__main__ as learner
from diloco_learner.settings import Settings
from diloco_learner.training import compilation_cache, platforms
from diloco_learner.training.compilation_cache import KEPT_BYTES_MAX, keep_on_disk

# Compiles as many programs as it is told, and says how many of them it found on the disk.
PROCESS = """
import resource, signal, sys
import diloco_learner.__main__ as learner
from diloco_learner.settings import Settings

learner._set_up_jax(
    Settings(cache=sys.argv[1], cache_bytes_max=int(sys.argv[2]), threads=1),
    alone=sys.argv[4] != "of an island",
)
import jax, jax.numpy as jnp
from jax import monitoring

found = []
monitoring.register_event_listener(
    lambda name, **_: found.append(name) if name.endswith("/cache_hits") else None
)
if sys.argv[4] == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
for n in range(int(sys.argv[3])):
    program = jax.jit(lambda x: jnp.tanh(x @ x.T) * n).lower(jnp.ones((8, 8))).compile()
    assert program(jnp.ones((8, 8))).shape == (8, 8)
print(len(found))
"""


def started(
    folder: Path, *, programs: int = 1, bytes_max: int = KEPT_BYTES_MAX, how: str = "", **more: str
) -> "subprocess.Popen[str]":
    """A process that sets up JAX as a learner does, whatever the tests' own keeps and where."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | more
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(folder), str(bytes_max), str(programs), how],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def found(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """(programs that it read instead of compiling them, what it told on standard error or out)."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    *told, count = out.strip().splitlines()
    return int(count), "\n".join(told) + err


def sizes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.rglob("*-cache")]


def test_the_next_process_reads_what_two_at_once_have_written(tmp_path: Path) -> None:
    both = [started(tmp_path, programs=2) for _ in range(2)]
    for process in both:
        found(process)
    written = sizes(tmp_path)
    assert found(started(tmp_path, programs=2))[0] >= 2
    assert sizes(tmp_path) == written


def test_the_least_recently_used_are_removed_above_the_limit(tmp_path: Path) -> None:
    found(started(tmp_path, programs=1))
    one = max(sizes(tmp_path))
    limit = max(1 << 20, one)
    (own,) = tmp_path.iterdir()
    old = own / "old-cache"
    old.write_bytes(bytes(limit))
    (own / "old-atime").write_bytes(bytes(8))
    found(started(tmp_path, programs=3, bytes_max=limit))
    assert not old.exists()
    assert 0 < sum(sizes(tmp_path)) <= limit


def test_a_process_looks_at_all_that_is_kept_once_and_again_when_it_has_written_as_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    plain = LRUCache._evict_if_needed

    def counted(self: Any, *, additional_size: int = 0) -> None:
        looks.append(additional_size)
        plain(self, additional_size=additional_size)

    monkeypatch.setattr(LRUCache, "_evict_if_needed", counted)
    compilation_cache._look_seldom()
    compilation_cache._look_seldom()  # a second one changes nothing
    cache = LRUCache(str(tmp_path), max_size=6400)
    for n in range(250):
        cache.put(f"program-{n}", bytes(40))
    assert looks == [100] * (250 // 2), "room for two is made at once"
    assert 5000 < sum(sizes(tmp_path)) <= 6400
    assert cache.get("program-249") and not cache.get("program-0")
    cache.put("a large one", bytes(3000))
    assert looks[-1] == 3000 and sum(sizes(tmp_path)) <= 6400


def test_what_died_in_writing_is_removed(tmp_path: Path) -> None:
    found(started(tmp_path))
    (own,) = tmp_path.iterdir()
    whole = set(own.glob("*-cache"))
    (own / "cut-cache").write_bytes(b"half of a program")
    (own / "empty-cache").write_bytes(b"")
    (own / "empty-atime").write_bytes(bytes(8))
    before = jax.config.values["jax_compilation_cache_dir"]
    try:
        assert keep_on_disk(tmp_path) == ""
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        jax.config.update("jax_compilation_cache_max_size", -1)
    assert set(own.glob("*-cache")) == whole


def test_a_folder_that_cannot_be_written_ends_no_learner(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    count, told = found(started(tmp_path / "file" / "compiled"))
    assert count == 0
    assert "compiled programs are not kept" in told and "DILOCO_CACHE" in told
    assert "Traceback" not in told


def test_a_disk_that_fills_up_later_ends_no_learner(tmp_path: Path) -> None:
    count, _ = found(started(tmp_path, how="full"))
    assert count == 0
    # And what came of it is in nobody's way once there is room.
    found(started(tmp_path))
    assert found(started(tmp_path))[0] >= 1


def test_hosts_of_an_island_keep_none_and_read_none(tmp_path: Path) -> None:
    """The first one alone would have some, and be ready long before the others."""
    found(started(tmp_path))
    kept = sizes(tmp_path)
    more = {"JAX_COMPILATION_CACHE_DIR": str(next(tmp_path.iterdir()))}
    for given in ({}, more):
        assert found(started(tmp_path, programs=2, how="of an island", **given))[0] == 0
        assert sizes(tmp_path) == kept


@pytest.mark.parametrize("alone", [True, False])
def test_jax_is_told_whether_a_process_is_alone(
    alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, object] = {}
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    monkeypatch.setattr(platforms, "settle", lambda: None)
    monkeypatch.setattr(sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr(compilation_cache, "keep_on_disk", lambda *_: "")
    settings = SimpleNamespace(threads=0, compiled=tmp_path, cache_bytes_max=1)
    learner._set_up_jax(cast(Settings, settings), alone=alone)
    assert told.get("jax_enable_compilation_cache", True) is alone


@pytest.mark.parametrize(("hosts", "alone"), [("1", True), ("2", False)])
def test_a_process_of_several_hosts_is_set_up_as_one(
    hosts: str, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(Exception):
        pass

    told: list[bool] = []

    def set_up(settings: Settings, *, alone: bool) -> None:
        told.append(alone)
        raise Enough

    for name, value in (("HOSTS", hosts), ("HOST_INDEX", "0"), ("HOST_ADDRESS", "node0:8470")):
        monkeypatch.setenv(f"DILOCO_{name}", value)
    monkeypatch.setattr(learner, "_wants_large_pages", lambda: False)
    monkeypatch.setattr("diloco_shared.process.logs.configure", lambda *_, **__: None)
    monkeypatch.setattr(learner, "_set_up_jax", set_up)
    with pytest.raises(Enough):
        learner.main()
    assert told == [alone]


def test_where_they_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_CACHE", raising=False)
    assert Settings(data=tmp_path).compiled == tmp_path / "compiled"
    assert Settings(data=tmp_path, cache="elsewhere").compiled == Path("elsewhere")
    assert Settings(data=tmp_path, cache="off").compiled is None


@pytest.mark.parametrize(
    ("kernel", "environment", "libc", "expected"),
    [
        ("always [madvise] never\n", {}, ("glibc", "2.36"), True),
        ("always madvise [never]\n", {}, ("glibc", "2.36"), False),
        (None, {}, ("glibc", "2.36"), False),
        ("[always] madvise never\n", {}, ("glibc", "2.31"), False),
        ("[always] madvise never\n", {}, ("", ""), False),
        ("[always] madvise never\n", {"GLIBC_TUNABLES": "x=1"}, ("glibc", "2.36"), False),
    ],
)
def test_a_learner_starts_itself_over_where_large_pages_can_be_had(
    kernel: str | None,
    environment: dict[str, str],
    libc: tuple[str, str],
    expected: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And once only: then its environment says so."""
    if kernel is not None:
        (tmp_path / "enabled").write_text(kernel)
    monkeypatch.setattr(learner, "THP", tmp_path / "enabled")
    monkeypatch.setattr(learner.sys, "platform", "linux")
    monkeypatch.setattr(learner.platform, "libc_ver", lambda: libc)
    monkeypatch.delenv(learner.TUNABLES, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert learner._wants_large_pages() is expected
