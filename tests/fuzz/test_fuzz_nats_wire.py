"""The lane's parser is fuzzed for a while, and what once broke it is tried again."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fuzz.wire_target import one, parse

from diloco_shared.bus.nats import wire as nats_wire

HERE = Path(__file__).parent
# Some seconds of one core; `make test` looks for a minute beside other tests, and `make fuzz` for
# longer, and elsewhere every time.
RUNS = 25_000
# Each of the planted faults shows within some thousands.
RUNS_PLANTED = 50_000
# Faults of the parser: (text, what stands there instead).
PLANTED = {
    "half-an-end-is-enough": ("self._end - self._start < 2", "self._end - self._start < 1"),
    "a-header-needs-no-colon": ("        if colon:\n", "        if colon or value[0]:\n"),
    "a-line-may-have-no-sizes": (
        "except ValueError:\n        raise W",
        "except KeyError:\n        raise W",
    ),
}
fuzzed = pytest.mark.skipif(
    find_spec("atheris") is None,
    reason="needs atheris, which there is for Linux on x86-64 and Python 3.11 to 3.13",
)


def fuzz(scratch: Path, runs: int, *flags: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """So many inputs, always the same ones. `path`: where imports look first."""
    paths = os.pathsep.join(p for p in (path, os.environ.get("PYTHONPATH", "")) if p)
    command = [sys.executable, str(HERE / "fuzz_nats_wire.py"), str(scratch / "new")]
    return subprocess.run(
        [*command, f"-runs={runs}", "-seed=1", *flags],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_corpus_reaches_every_event() -> None:
    """Fuzzing begins with sound streams, one of each kind."""
    seen = set()
    for path in (HERE / "corpus").glob("stream-*"):
        events, failed = parse(path.read_bytes()[1:], b"")
        assert not failed, path.name
        seen |= {type(event).__name__ for event in events}
    assert seen == {"tuple", "Info", "Ping", "Pong", "ServerError"}, (
        "a tuple is a message that arrived"
    )


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.name) for p in sorted((HERE / "corpus").iterdir())]
)
def test_an_input_that_was_kept_breaks_nothing(path: Path) -> None:
    one(path.read_bytes())


@fuzzed
@pytest.mark.whole
def test_no_input_breaks_the_parser(tmp_path: Path) -> None:
    """One that does is kept in corpus/."""
    done = fuzz(tmp_path, RUNS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {RUNS} runs" in done.stderr


@fuzzed
@pytest.mark.whole
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(tmp_path: Path, fault: str) -> None:
    old, new = PLANTED[fault]
    source = Path(nats_wire.__file__).read_text(encoding="utf-8")
    assert source.count(old) == 1, "the fault does not fit the code"
    nats = tmp_path / "diloco_shared" / "bus" / "nats"
    nats.mkdir(parents=True)
    for package in (nats.parent.parent, nats.parent, nats):
        (package / "__init__.py").touch()
    (nats / "wire.py").write_text(source.replace(old, new), encoding="utf-8")
    done = fuzz(tmp_path, RUNS_PLANTED, f"-artifact_prefix={tmp_path}/", path=str(tmp_path))
    assert done.returncode != 0, done.stderr[-3000:]
    (kept,) = tmp_path.glob("crash-*")
    one(kept.read_bytes())  # the sound parser takes it
