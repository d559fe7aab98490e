"""Figures of bench/learner_step.py come of its turns; its loops compute the same as the product."""

import math
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import learner_step
import numpy as np
import pytest
from stepping import cluster, loops, page, turns
from stepping.sizes import SIZES, Size, facts, flops_per_token, spec_of

from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.protocol.messages import Progress
from diloco_shared.spec.shapes import Shape, shape_of

TINY = SIZES["tiny"]


def window(who: str, steps: int, seconds: float = 10.0, cpu_s: float | None = None) -> turns.Window:
    """One that used half of its core, unless told otherwise."""
    return turns.Window(who, steps, seconds, seconds / 2 if cpu_s is None else cpu_s)


def report(step: int, wait_s: float, adopted: tuple[int, ...]) -> Progress:
    many = len(adopted)
    return Progress(
        learner="learner-1",
        incarnation=0,
        epoch=0,
        state="stepping",
        step=step,
        tokens=step * 64,
        c_steps=(0,) * many,
        c_tokens=(0,) * many,
        adopted=adopted,
        adopted_at=(0,) * many,
        loss=1.0,
        step_s=0.1,
        wait_s=wait_s,
    )


def test_a_learner_is_compared_with_the_bare_step_in_the_turn_beside_it() -> None:
    # The machine is half as fast in the second half: of each pair both are.
    windows = [
        window("plain jax", 90),
        window("bare", 100),
        window("learner", 98),
        window("torch", 60),
        window("torch", 30),
        window("learner", 48),
        window("bare", 50),
        window("plain jax", 45),
    ]
    assert learner_step.pairs(windows, "learner", "bare") == pytest.approx([0.98, 0.96])
    told = [cluster.Turn(windows[2], (0.0, 0.002), 3), cluster.Turn(windows[5], (0.001,), 1)]
    found = learner_step.speeds_of(windows, told, {"moved_s": 0.1, "evaluated_s": 0.2}, TINY)
    assert found["step_rate_over_bare"] == pytest.approx(0.97)
    assert found["steps_per_cpu_s_over_bare"] == pytest.approx(0.97)
    tokens = TINY.batch * TINY.context
    assert found["tokens_per_s"]["bare"] == pytest.approx(7.5 * tokens)
    assert found["tokens_per_s"]["learner"] == pytest.approx(7.3 * tokens)
    assert (found["best"], found["over_best"]) == ("bare", pytest.approx(7.3 / 7.5))
    assert found["blocked_s_per_step_p99"] == 0.002
    assert found["adopted_per_step"] == pytest.approx(4 / 146)
    # All fragments once in H steps, an evaluation in 96.
    assert found["method_share_of_fragments"] == pytest.approx(0.1 / 4 * 7.5)
    assert found["method_share_of_evaluations"] == pytest.approx(0.2 / 96 * 7.5)


def test_a_turn_begins_when_what_came_meanwhile_is_caught_up_with() -> None:
    first = cluster.SETTLING_STEPS
    waits = [0.0] * (first + 1) + [0.25, 0.25]
    told = [
        cluster.Report(100.0 + 2 * n, 50.0 + n, report(10 + n, wait_s, (n // 2, 5)))
        for n, wait_s in enumerate(waits)
    ]
    # A report was lost: two steps share what they waited.
    last = report(10 + first + 4, 0.75, (7, 6))
    told.append(cluster.Report(100.0 + 2 * first + 8, 50.0 + first + 7, last))
    found = cluster.turn_of(told)
    assert found.window == window("learner", 4, 8.0, 7.0)
    assert found.blocked_s == (0.25, 0.0, 0.25, 0.25)
    assert found.adopted == 7 - first // 2 + 1
    with pytest.raises(SystemExit, match="longer --window"):
        cluster.turn_of(told[: first + 1])


def test_a_core_is_counted_as_the_system_counts_it() -> None:
    fields = " ".join(["S", *(["0"] * 10), "300", "50", "9", "9"])
    assert cluster.cpu_s(f"1 (a (b) c) {fields}\n") == 350 / cluster.TICKS_PER_S


def test_memory_is_the_peak_without_files() -> None:
    status = (
        "Name:\tx\nVmHWM:\t    900 kB\nRssAnon:\t 500 kB\nRssFile:\t 100 kB\nRssShmem:\t 50 kB\n"
    )
    assert cluster.peak_bytes(status) == 750 * 1024
    assert learner_step.budget_bytes(SIZES["11m"], 2) > 16 * facts(SIZES["11m"])["parameters"]


@pytest.mark.parametrize("size", [TINY, Size("nano", 2, 32, {"tied": True, "embed_scale": False})])
def test_plain_jax_is_the_same_model(size: Size, tmp_path: Path) -> None:
    spec = spec_of(size)
    trainer = Trainer(Program.build(spec))
    loops.prepare(spec, tmp_path)
    tokens_BxL1 = np.load(tmp_path / "tokens.npy")[0]
    assert tokens_BxL1.shape == (size.batch, size.context + 1)
    expected = float(trainer.program.model.loss(trainer.params, tokens_BxL1))
    assert len(loops.tensors(tmp_path)) == len(trainer.program.layout.tensors)
    params = {name: jnp.asarray(values) for name, values in loops.tensors(tmp_path).items()}
    found = loops.plain_loss(shape_of(spec.model), jnp.float32, params, jnp.asarray(tokens_BxL1))
    assert float(found) == pytest.approx(expected, abs=1e-5)


@pytest.mark.long
def test_a_loop_takes_steps_in_its_turn_and_learns(tmp_path: Path) -> None:
    command = [sys.executable, str(learner_step.HERE), "--size", "tiny", "--folder", str(tmp_path)]
    environment = cluster.loop_environment(cluster.environment_of(threads=1), 1)
    assert turns.asked([*command, "--child", "prepare"], environment) == {"prepared": True}
    found = {
        what: turns.Turns(what, [*command, "--child", what], environment)
        for what in ("ours", "plain")
    }
    try:
        losses = learner_step.check_losses(found)
        turn = found["ours"].turn(0.2)
    finally:
        for loop in found.values():
            loop.end()
    assert turn.who == "ours" and turn.steps > 0 and turn.seconds > 0 and turn.cpu_s > 0
    assert losses["ours"] == pytest.approx(math.log(256), rel=0.3)
    assert all(loop.process.returncode == 0 for loop in found.values())


def test_loops_that_compute_something_else_are_not_compared() -> None:
    class Loop:
        def __init__(self, loss: float) -> None:
            self.ready = {"first_loss": loss}

    apart: Any = {"bare": Loop(5.5), "torch": Loop(5.6)}
    with pytest.raises(SystemExit, match="do not compute the same"):
        learner_step.check_losses(apart)


def test_operations_are_counted_and_shared_out_of_the_peak() -> None:
    # 2 layers: 4 matrices of 8 x 8 and 3 of 8 x 16; head 8 x 32; attention: half of 2 x 8 x 10.
    shape = Shape(32, 8, 2, 2, 2, 4, 16)
    assert flops_per_token(shape, 10) == 6 * (2 * (4 * 64 + 3 * 128) + 8 * 32 + 2 * 80)
    found = {"tokens_per_s": {"bare": 200.0, "learner": 100.0}, "step_rate_over_bare": 0.5}
    each = flops_per_token(shape_of(spec_of(TINY).model), TINY.context)
    row = learner_step.shares_of_peak("tiny", found, 400.0 * each)
    assert row["mfu"] == {"bare": pytest.approx(0.5), "learner": pytest.approx(0.25)}
    assert learner_step.shares_of_peak("tiny", found, None)["mfu"] == {
        "bare": None,
        "learner": None,
    }
    assert learner_step.peak_flops("NVIDIA H100 80GB HBM3", None) == 989e12
    assert learner_step.peak_flops("NVIDIA H100 PCIe", None) == 756e12
    assert learner_step.peak_flops("NVIDIA L40S", None) == 362e12
    assert (learner_step.peak_flops("cpu", None), learner_step.peak_flops("cpu", 1.0)) == (
        None,
        1e12,
    )


@pytest.mark.parametrize(("name", "millions"), [("11m", 10.8), ("125m", 123), ("350m", 357)])
def test_sizes_are_what_they_are_called(name: str, millions: float) -> None:
    assert facts(SIZES[name])["parameters"] / 1e6 == pytest.approx(millions, rel=0.05)


def test_a_learner_is_not_stopped_for_so_long_that_it_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["learner_step.py", "--window", "1000"])
    with pytest.raises(SystemExit):
        learner_step.parsed()


def test_the_page_says_what_was_measured(tmp_path: Path) -> None:
    windows = [window("bare", 100), window("learner", 98)]
    told = [cluster.Turn(windows[1], (0.001,), 98)]
    figures = learner_step.speeds_of(windows, told, {"moved_s": 0.1, "evaluated_s": 0.2}, TINY)
    about = {"machine": "a machine", "seed": 0, "model": facts(TINY)}
    file = tmp_path / "page.md"
    with pytest.raises(FileNotFoundError):
        page.put(file, "")
    file.write_text("before\n<!-- figures -->\nold\n<!-- end -->\nafter\n")
    page.put(file, page.table({"figures": figures, **about}))
    text = file.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| steps a second of the learner over the bare step | 0.98 | 0.97 or more |" in text
    assert f"| the learner | {9.8 * TINY.batch * TINY.context:,.0f} |" in text
    page.put(file, "")  # again, in the same place
    file.write_text("a page without marks")
    with pytest.raises(ValueError, match="has no lines"):
        page.put(file, "")
