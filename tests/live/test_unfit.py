"""A learner that cannot load the model: the run says so, does without it or waits, and goes on."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from live.stack import Stack, spec, up

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

# Of one of two learners the model has a mistake, in line 9, until a file is there.
MODEL = """\
import os
from pathlib import Path

from diloco_learner.models import build

def factory(config):
    mended = Path(__file__).with_name("mended").exists()
    if os.environ["DILOCO_ID"] == "learner-2" and not mended:
        raise LookupError("there is no such layer")
    return build(config.model_copy(update={"factory": None}))
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, on the path of all learners."""
    (tmp_path / "half_a_model.py").write_text(MODEL)
    path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    return tmp_path / "half_a_model.py"


@pytest.fixture
def stack(model: Path, tmp_path: Path) -> Iterator[Stack]:
    with up(tmp_path / "data", "--learners", "2") as stack:
        members = stack.client.members
        stack.wait_until(lambda: sum(m["alive"] for m in members()) >= 4, "everybody")
        yield stack


@pytest.mark.parametrize(
    ("learners_min", "state"), [(1, "running"), pytest.param(2, "waiting", marks=pytest.mark.long)]
)
def test_a_run_names_the_learner_that_cannot_work_and_begins_with_enough_others(
    learners_min: int, state: str, stack: Stack, model: Path
) -> None:
    body = spec(model={"factory": "half_a_model:factory"})
    stack.client.create_run({**body, "membership": {"learners_min": learners_min}})
    why = f"learner-2 cannot work: LookupError: there is no such layer (raised at {model}:9)"

    def named() -> bool:
        view = stack.client.run("r")
        codes = ["running", "learners-unfit"] if state == "running" else ["learners-unfit", state]
        return view["state"] == state and view["reason_codes"] == codes and why in view["reason"]

    stack.wait_until(named, f"{state}, with the reason")
    assert why in stack.run("status", "r")
    assert (len(stack.rounds()) > 0) <= (state == "running"), "too few have joined"
    if state == "running":
        stack.wait_until(lambda: len(stack.committed()) > 6, "rounds with one of the two")
    model.with_name("mended").touch()
    stack.wait_until(lambda: stack.learner("learner-2").get("step"), "steps of the mended one")
    stack.wait_until(lambda: "learners-unfit" not in stack.codes(), "no more of it")
    assert len(stack.told("unfit")) == 1
    stack.end()
