"""The count of tokens that whole worlds are checked with, against one that keeps every token."""

from hypothesis import given
from syncer.ledger_world import P, World, record, verdict
from syncer.test_ledger import histories, quick

from diloco_shared.protocol.messages import (
    Grant,
    Progress,
    TapeRebirth,
    TapeRestore,
    TapeRound,
)
from diloco_simulator.checkers.fates import Fates, painted, within
from diloco_simulator.checkers.heard import Heard

NONE = Fates.none(P, tuple(range(P)))


@quick
@given(histories)
def test_both_count_the_same_at_every_instant(history: list[tuple[str, str, int]]) -> None:
    world = World()
    for action, learner, arg in history:
        if world.ended:
            break
        getattr(world, action)(world.now[learner], arg)
        taped = NONE
        for r in world.tape:
            taped = taped.after(r)
        words = [(x, k.tokens, dict(enumerate(k.base)), k.left) for x, k in world.heard.items()]
        now = taped.hears(words)
        for p, model in enumerate(world.model()):
            found = dict(now.settled[p])
            for life in now.lives:
                over = now.over(life) or life[0] in world.silent
                for fate, n in now.classes(life, p, over=over).items():
                    found[fate] += n
            assert found == model.model_dump()
        over = {x for x in now.lives if now.over(x) or x[0] in world.silent}
        assert now.reread + sum(now.behind(x) for x in over) == world.reread(), "again"


def test_a_line_is_painted_where_nothing_else_is() -> None:
    line = painted((), 10, 20, "refused")
    assert painted(line, 0, 30, "lost") == ((0, 10, "lost"), (10, 20, "refused"), (20, 30, "lost"))
    assert painted(line, 20, 30, "refused") == ((10, 30, "refused"),)
    assert painted(line, 5, 5, "lost") == line


def test_a_merge_paints_over_what_was_refused_and_over_nothing_else() -> None:
    line = painted(painted((), 0, 10, "overwritten"), 10, 40, "refused")
    line = painted(line, 5, 30, "merged", ("refused",))
    assert line == ((0, 10, "overwritten"), (10, 30, "merged"), (30, 40, "refused"))
    assert [within(line, 35, *fate) for fate in ((), ("merged",), ("refused",))] == [35, 20, 5]


def of_all(fates: Fates, p: int = 0) -> dict[str, int]:
    """Where all tokens are once every life is over; classes without any are left out."""
    found = dict(fates.settled[p])
    for life in fates.lives:
        for fate, n in fates.classes(life, p, over=True).items():
            found[fate] += n
    return {fate: n for fate, n in found.items() if n}


def merging(n: int, start: int, stop: int, version: int, incarnation: int = 0) -> TapeRound:
    merged = verdict("a", "merged", start, stop, incarnation=incarnation)
    return record(n, [merged]).model_copy(update={"version": version})


def test_what_a_version_merged_that_is_no_more_is_lost() -> None:
    fates = NONE.after(merging(0, 0, 100, 1)).after(merging(2, 100, 150, 2))
    assert of_all(fates) == {"merged": 150}
    again = TapeRebirth.model_construct(epoch=1, versions=(1, 0))
    assert of_all(fates.after(again)) == {"merged": 100, "lost": 50}


def test_a_restore_goes_back_to_what_was_there_then() -> None:
    """Lives of then and of now are over; new ones count beside them."""
    mark = NONE.after(merging(0, 0, 100, 1)).hears([(("a", 0), 130, {0: 110}, False)])
    now = mark.after(merging(2, 110, 200, 2))
    back = now.after(TapeRestore.model_construct(epoch=1), mark)
    assert of_all(back) == {"merged": 100, "overwritten": 10, "lost": 20}
    assert back.hears([(("a", 0), 300, {}, False)]) == back, "that life is over"
    assert back.hears([(("a", 1), 7, {}, False)]).lives.keys() == {("a", 1)}


def report(step: int, **over: object) -> Progress:
    fields = {"learner": "a", "incarnation": 0, "state": "stepping", "c_tokens": (step,) * P}
    return Progress.model_construct(**{**fields, "step": step, "tokens": step, **over})


def test_silence_is_told_as_far_as_it_is_known() -> None:
    heard = Heard(P, 5.0, since=0.0)
    a = ("a", 0)
    assert heard.silent(a, 5.0) is False and heard.silent(a, 6.0) is True
    assert heard.progress(report(1), {}, 10.0)
    assert heard.silent(a, 15.0) is False and heard.silent(a, 16.0) is True
    heard.forgives(17.0)  # it may have had a lease when the link was cut, or none
    assert heard.silent(a, 20.0) is None and heard.silent(a, 23.0) is True
    assert heard.progress(report(2), {}, 24.0)
    heard.progress(report(1), {}, 28.0)  # overtaken on the way: it says nothing of now
    assert heard.silent(a, 30.0) is True
    assert not heard.progress(report(3), {"a": 1}, 30.0), "a newer life is on the tape"
    assert not heard.progress(report(3, c_tokens=(0,) * 99), {}, 30.0), "a stranger's"


def test_of_whom_somebody_is_to_be_told() -> None:
    """Of newest lives that let a lease pass, and said no goodbye."""
    taped = Fates.none(P, tuple(range(P))).hears(
        [((name, life), 9, {}, False) for name, life in (("a", 0), ("b", 0), ("b", 1), ("c", 0))]
    )
    heard = Heard(P, 5.0, since=0.0)
    assert heard.missing(taped, 5.0, {}) == set()
    assert heard.missing(taped, 6.0, {}) == {"a", "b", "c"}
    heard.progress(report(10), {}, 6.0)
    heard.progress(report(10, learner="c", state="finished"), {}, 6.0)
    heard.progress(report(0, learner="d"), {}, 6.0)
    heard.granted(Grant.model_construct(learner="b", incarnation=2, nonce="n"), 6.0)
    assert heard.missing(taped, 11.0, {}) == set()
    lost = heard.missing(taped, 12.0, {})
    assert lost == {"a", "d"}, "of b's newest life nothing is known yet"
    assert heard.missing(taped, 12.0, {"a": 0, "d": -1}) == {"d"}, "a has said goodbye"


def test_what_one_tells_after_minutes_of_silence_may_be_believed_or_not() -> None:
    heard = Heard(P, 5.0, since=0.0)
    heard.progress(report(1), {}, 10.0)
    heard.progress(report(2), {}, 500.0)
    assert heard.doubted == set()
    heard.progress(report(3), {}, 1100.0)
    assert heard.doubted == {("a", 0)}
