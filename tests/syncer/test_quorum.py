"""Whether enough learners are ready, and the answer in words."""

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_shared.spec.quorum import AtLeast
from diloco_syncer.rounds.quorum import Readiness, explain
from diloco_syncer.rounds.quorum import ready as those_ready


def ready(learner: str, steps: int, silent_s: float = 0.0) -> Readiness:
    return Readiness(learner, steps, silent_s)


@examples(60)
@given(st.lists(st.integers(0, 6), max_size=8), st.integers(1, 8), st.integers(0, 6))
def test_k_with_enough_steps_make_it(steps: list[int], needed: int, steps_needed: int) -> None:
    live = [ready(f"l{n}", count) for n, count in enumerate(steps)]
    enough = [r.learner for r in live if r.steps >= steps_needed]
    assert list(those_ready(live, steps_needed)) == enough
    answer = AtLeast(needed).answer(enough)
    assert answer.enough == (len(enough) >= needed)
    assert answer.short == max(needed - len(enough), 0)


def said(live: list[Readiness], needed: int = 2) -> str:
    answer = AtLeast(needed).answer(those_ready(live, 4))
    return explain(live, answer, steps_needed=4, suspect_s=3.0)


def test_the_answer_names_who_is_awaited() -> None:
    assert said([ready("a", 4), ready("b", 1), ready("c", 0, 3.5)]) == (
        "1 of 3 ready, 2 needed; b has 1 of 4 steps; c is suspect for 3.5 s"
    )
    assert said([ready("a", 4), ready("b", 5)]) == "2 of 2 ready, 2 needed"
    assert "b is suspect for 3.0 s" in said([ready("a", 4), ready("b", 1, 3.0)])


def test_the_answer_stays_readable_whoever_is_missing() -> None:
    words = said([ready(f"learner-{n}", 0) for n in range(60)])
    assert words.endswith("; and 56 more")
    assert len(words) < 500
