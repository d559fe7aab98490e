"""A small run as the API tells it: three learners, one killed and back."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.__main__ import main

Row = dict[str, Any]
Diloco = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def without_compiled_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that compile would keep their programs in the home of whoever runs the tests."""
    monkeypatch.setenv("DILOCO_CACHE", "off")


@pytest.fixture
def shut(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Forbids looking into a folder. Modes of files would forbid root nothing."""

    def asking(name: str, folder: Path) -> Callable[..., Any]:
        asked = getattr(Path, name)

        def look(path: Path, **how: Any) -> Any:
            if path.is_relative_to(folder):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return asked(path, **how)

        return look

    def shut(folder: Path) -> None:
        for name in ("stat", "is_file", "is_dir", "exists"):
            monkeypatch.setattr(Path, name, asking(name, folder))

    return shut


def verdict(learner: str, outcome: str = "merged", incarnation: int = 0) -> Row:
    return {
        "learner": learner,
        "outcome": outcome,
        "incarnation": incarnation,
        "reason": "in time" if outcome == "merged" else "is silent",
    }


def closed(number: int, at: float, *verdicts: Row, outcome: str = "committed") -> Row:
    return {
        "seq": number + 2,
        "round": number,
        "fragment": number % 2,
        "outcome": outcome,
        "reason": f"merged {len(verdicts)} contributions",
        "quorum_reason": "2 of 3 ready, 2 needed",
        "quorum_s": 0.1,
        "grace_s": 0.25,
        "sync_s": 0.2,
        "verdicts": list(verdicts),
        "at": at,
    }


def happened(kind: str, at: float, source: str = "syncer-1", **data: Any) -> Row:
    return {
        "seq": int(at * 10),
        "kind": kind,
        "source": source,
        "text": f"{kind} {data.get('learner', source)}",
        "data": data,
        "at": at,
        "run": "demo",
    }


@pytest.fixture
def events() -> list[Row]:
    """a, b, c join at 0 and step from 10; b is killed at 20, joins at 26, steps from 30."""
    joins = [happened("join", 0.0, learner=x) for x in "abc"]
    begins = [happened("began", 10.0, x, learner=x, incarnation=0) for x in "abc"]
    fault = {"id": "f", "kind": "kill", "target": "b"}
    return [
        *joins,
        *begins,
        happened("evaluation", 11.0, "a", val_loss=6.0, steps=0, final=False),
        happened("fault-planned", 12.0, "coordinator") | {"data": fault},
        happened("fault-applied", 20.0, "b") | {"data": fault},
        happened("learner-lost", 25.0, learner="b"),
        happened("join", 26.0, learner="b"),
        happened("learner-alive", 26.5, learner="b"),
        happened("recovered", 30.0, "b", learner="b", incarnation=1),
        happened("evaluation", 49.0, "a", val_loss=1.5, steps=96, final=True),
        happened("leave", 50.0, "a"),
    ]


@pytest.fixture
def rounds() -> list[Row]:
    """Rounds at 15, 22, 28, 31 and 50; b is merged in the first and the last."""
    a, c = verdict("a"), verdict("c")
    return [
        closed(0, 15.0, a, verdict("b"), c),
        closed(1, 22.0, a, verdict("b", "missed"), c),
        closed(2, 28.0, a, c),
        closed(3, 31.0, a, outcome="skipped"),
        closed(4, 50.0, a, verdict("b", incarnation=1), c),
    ]


@pytest.fixture
def run() -> Row:
    def learner(wait_s: float, **more: Any) -> Row:
        shown = {"state": "stepping", "alive": True, "incarnation": 0, "step": 100, "loss": 1.6}
        return shown | {"tokens_per_s": 1000.0, "wait_s": wait_s, "merged_round": 4} | more

    return {
        "name": "demo",
        "state": "finished",
        "reason": "its budget is used up",
        "desired": "running",
        "created_at": 1.0,
        "quorum": 2,
        "spec": {"seed": 7, "membership": {"lease_s": 5.0}},
        "status": {
            "stamp": {"round": 4, "steps": 96, "fraction": 1.0},
            "versions": [3, 2],
            "quorum": 2,
            "rounds_committed": 4,
            "rounds_skipped": 1,
            "alive": ["a", "b", "c"],
            "participating": ["a", "b"],
            "parameters": 1000,
            "tokens_per_step": 512,
            "tokens_processed": 512 * 300,
            "tokens_useful": 512 * 240,
            "bytes_up": 1500,
            "bytes_down": 2_500_000,
            "refused": {"late": 2},
            "learners": {
                "a": learner(0.01, socket_bytes={"data_up": 100, "control_down": 7}),
                "b": learner(9.0, incarnation=1, loss=None),
                "c": learner(0.02, alive=False, state="down", socket_bytes={"data_up": 200}),
            },
        },
    }


@pytest.fixture
def free_port() -> int:
    """A port where nobody listened a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def diloco(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Diloco:
    """Run the command: exit status, standard output, standard error."""

    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["diloco", *arguments])
        status = 0
        try:
            main()
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return (status, *capsys.readouterr())

    return command
