"""How fast a learner trains: the window, what counts as a step's time, and utilisation."""

from types import SimpleNamespace
from typing import Any

import pytest

from diloco_learner import work_io
from diloco_learner.training.computing_io import island_of
from diloco_learner.training.speed import (
    PEAKS,
    WINDOW_S,
    WINDOW_STEPS,
    WINDOW_STEPS_MAX,
    Arithmetic,
    Island,
    Speed,
    Window,
    report,
    utilisation,
)
from diloco_learner.work_io import Work
from diloco_shared.spec.run import Model
from diloco_shared.spec.shapes import SHAPES, flops_per_token

H100 = "NVIDIA H100 80GB HBM3"


def island(kind: str = H100, devices: int = 1) -> Island:
    return Island("gpu", kind, devices, False, 5, 7, 9)


def stepping(speed: Speed, at: float, step_s: float, steps: int, tokens: int = 100) -> float:
    """So many boundaries from `at` on; when the last one was."""
    for n in range(steps):
        speed.stepped(at + n * step_s, tokens, step_s / 4)
    return at + (steps - 1) * step_s


# --- the window --------------------------------------------------------------------------------


def test_before_two_steps_no_speed_is_made_up() -> None:
    speed = Speed()
    assert speed.window == Window() and speed.window.tokens_per_s is None
    speed.stepped(1000.0, 100, 0.5)  # compiled in it: it has no time of its own
    assert speed.window.tokens_per_s is None and speed.window.data_wait_ratio is None
    assert speed.data_wait_s == 0.5, "yet what it waited for is known"
    speed.stepped(1002.0, 100, 0.5)
    assert speed.window == Window(1, 2.0, 100, 0.5)
    assert speed.window.tokens_per_s == 50.0
    assert speed.window.data_wait_ratio == 0.25


def test_of_quick_steps_the_newest_ten_seconds_count() -> None:
    speed = Speed()
    at = stepping(speed, 0.0, 1.0, 30)
    assert speed.window.tokens_per_s == 100
    stepping(speed, at + 0.5, 0.5, 20)  # twice as fast for ten seconds
    assert speed.window == Window(20, WINDOW_S, 2000, 2.5)


def test_of_slow_steps_the_newest_few_count() -> None:
    speed = Speed()
    at = stepping(speed, 0.0, 1.0, 30)
    stepping(speed, at + 60.0, 60.0, WINDOW_STEPS)
    assert speed.window.steps == WINDOW_STEPS
    assert speed.window.tokens_per_s == pytest.approx(100 / 60)


def test_of_very_quick_steps_no_more_are_kept_than_the_limit() -> None:
    speed = Speed()
    stepping(speed, 0.0, 1e-5, WINDOW_STEPS_MAX + 1000)
    assert speed.window.steps == WINDOW_STEPS_MAX
    assert len(speed._before) <= WINDOW_STEPS_MAX + 1
    assert speed.window.tokens_per_s == pytest.approx(1e7, rel=1e-3)


def test_what_comes_between_steps_takes_no_part_with_the_step_that_follows() -> None:
    """A device has finished its step by the end of a pause: the next boundary comes at once."""
    speed = Speed()
    at = stepping(speed, 0.0, 2.0, 4)
    before = speed.window
    speed.interrupted()
    speed.stepped(at + 300.0, 100, 0.0)
    assert speed.window == before
    speed.stepped(at + 302.0, 100, 0.0)
    assert speed.window.tokens_per_s == 50 and speed.window.steps == before.steps + 1


def test_while_a_fault_stops_the_process_no_step_is_timed() -> None:
    """The boundary may come at any moment about the stop: neither side of it counts."""
    speed = Speed()
    at = stepping(speed, 0.0, 2.0, 4)
    before = speed.window
    speed.untimed = True
    speed.stepped(at + 2.0, 100, 0.0)  # the stop is under way
    speed.stepped(at + 62.0, 100, 0.0)
    speed.untimed = False
    speed.stepped(at + 63.0, 100, 0.0)  # begun while it was stopped
    assert speed.window == before
    speed.stepped(at + 65.0, 100, 0.0)
    assert speed.window.steps == before.steps + 1 and speed.window.tokens_per_s == 50


# --- utilisation -------------------------------------------------------------------------------


def test_utilisation_against_a_count_by_hand() -> None:
    """One layer of width 2, two heads of 2, hidden 4, vocabulary 8, in sequences of 3 tokens."""
    overrides: dict[str, int | float | str | bool] = {
        "vocabulary": 8,
        "width": 2,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
        "head_width": 2,
        "hidden": 4,
    }
    model = Model(overrides=overrides, context_tokens=3)
    # Query and out 2 x 4 each, key and value 2 x 2 each, three of the MLP 2 x 4, the head 2 x 8.
    weights = 2 * 8 + 2 * 4 + 3 * 8 + 16
    # A token sees itself and those before it: 1, 2 and 3 of them, 2 on average and not 3. Scores
    # and mixtures are a product each, of two heads of width 2.
    attention = 2 * 2 * (2 * 2) * 2
    by_hand = 3 * (2 * weights + attention)
    arithmetic = Arithmetic.of(model, parameters=0)
    assert arithmetic == Arithmetic(by_hand, estimated=False)
    # 1e9 tokens a second of 480 operations each, of two devices that could do 989.4e12 each.
    assert by_hand == 480
    peak = island(devices=2).peak_flops
    assert peak == 2 * 989.4e12
    assert utilisation(1e9, arithmetic, peak) == pytest.approx(4.8e11 / 1.9788e15)


def test_a_model_of_ones_own_is_estimated_and_says_so() -> None:
    own = Arithmetic.of(Model(factory="mine:model"), parameters=1000)
    assert own == Arithmetic(6000.0, estimated=True)
    known = Arithmetic.of(Model(preset="1b", context_tokens=2048), parameters=1)
    assert known == Arithmetic(flops_per_token(SHAPES["1b"], 2048), estimated=False)


def test_a_device_that_is_not_in_the_table_has_no_utilisation() -> None:
    arithmetic = Arithmetic(6e9, False)
    for kind in ("cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "Tesla T4 + NVIDIA L4", ""):
        assert island(kind).peak_flops is None
        assert utilisation(1000.0, arithmetic, island(kind).peak_flops) is None
    assert utilisation(None, arithmetic, island().peak_flops) is None, "no step is timed yet"


def test_peaks_are_dense_ones_in_operations_per_second() -> None:
    assert all(5e13 < peak < 1e16 for peak in PEAKS.values())
    assert PEAKS["NVIDIA H100 80GB HBM3"] == PEAKS["NVIDIA H200"] < PEAKS["NVIDIA B200"]
    assert PEAKS["NVIDIA H100 PCIe"] < PEAKS["NVIDIA H100 80GB HBM3"]
    for one, other in (("v5 lite", "v5e"), ("v5", "v5p"), ("v6 lite", "v6e")):
        assert PEAKS[f"TPU {one}"] == PEAKS[f"TPU {other}"]


# --- what is told ------------------------------------------------------------------------------


class Chip:
    """A device as jax shows it."""

    def __init__(self, kind: str, platform: str, stats: dict[str, int] | None) -> None:
        self.device_kind, self.platform, self.stats = kind, platform, stats

    def memory_stats(self) -> dict[str, int] | None:
        if self.platform == "mute":
            raise RuntimeError("UNIMPLEMENTED")
        return self.stats


def test_memory_is_that_of_all_devices_where_they_tell_it() -> None:
    stats = {"bytes_in_use": 10, "peak_bytes_in_use": 30, "bytes_limit": 80}
    assert island_of([Chip(H100, "gpu", stats)] * 2) == Island("gpu", H100, 2, False, 20, 60, 160)
    # Some tell no peak and no limit.
    assert island_of([Chip("TPU v4", "tpu", {"bytes_in_use": 10})]) == Island(
        "tpu", "TPU v4", 1, False, 10, 10, None
    )


@pytest.mark.parametrize(
    "chips",
    [
        [Chip("cpu", "cpu", {"bytes_in_use": 10})],
        [Chip("odd", "odd", None)],
        [Chip("mute", "mute", None)],
        [Chip("odd", "odd", {"bytes_in_use": 10}), Chip("odd", "odd", None)],
    ],
    ids=[
        "a CPU",
        "one that tells nothing",
        "one that cannot be asked",
        "one of two that tells nothing",
    ],
)
def test_else_it_is_that_of_the_process(chips: list[Chip]) -> None:
    found = island_of(chips)
    assert found.memory_of_process and found.memory_limit_bytes is None
    # A Python process with jax in it.
    assert found.memory_peak_bytes >= found.memory_bytes > 10_000_000


def test_what_is_told_has_every_figure_and_nothing_that_nobody_knows() -> None:
    speed = Speed()
    before = report(speed, island("cpu"), Arithmetic(600.0, True), "r", "a", 2)
    assert (before.run, before.learner, before.incarnation, before.device) == ("r", "a", 2, "cpu")
    assert before.tokens_per_s is before.data_wait_ratio is before.mfu is before.peak_flops is None
    assert before.flops_per_token == 600 and before.flops_estimated
    stepping(speed, 0.0, 1.0, 3)
    after = report(speed, island(), Arithmetic(989.4e10, False), "r", "a", 2)
    assert (after.steps, after.seconds, after.tokens_per_s) == (2, 2.0, 100.0)
    assert after.mfu == pytest.approx(1.0) and not after.flops_estimated
    assert (after.data_wait_ratio, after.data_wait_s) == (0.25, 0.75)
    assert (after.memory_of, after.memory_bytes, after.memory_peak_bytes) == ("device", 5, 7)


def at_work(**given: Any) -> Any:
    """What of a learner's work its speed and its end are told from."""
    usual = {
        "train_loop": None,
        "computing": SimpleNamespace(island=lambda: "eight devices"),
        "arithmetic": "of the model",
        "spec": SimpleNamespace(name="r"),
        "context": SimpleNamespace(me="a", incarnation=3),
        "beat": None,
    }
    return SimpleNamespace(**{**usual, **given})


def test_a_learner_tells_its_speed_once_it_trains_on_a_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(work_io, "report", lambda *given: given)
    assert Work.speed(at_work()) is None
    loop = SimpleNamespace(speed="fast")
    nowhere = SimpleNamespace(island=lambda: None)
    assert Work.speed(at_work(train_loop=loop, computing=nowhere)) is None
    told = Work.speed(at_work(train_loop=loop))
    assert told == ("fast", "eight devices", "of the model", "r", "a", 3)


@pytest.mark.parametrize(
    ("beat", "ends"),
    [
        (None, False),
        (SimpleNamespace(state="running"), False),
        (SimpleNamespace(state="paused"), False),
        (SimpleNamespace(state="finished"), True),
        (SimpleNamespace(state="stopped"), True),
    ],
)
def test_a_run_ends_its_learners_work_when_it_is_over(beat: Any, ends: bool) -> None:
    run_ends: Any = Work.run_ends
    assert run_ends.fget(at_work(beat=beat)) is ends
