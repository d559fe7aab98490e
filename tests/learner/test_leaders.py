"""Several syncer shards are one syncer to a learner, whatever one of them does meanwhile."""

from typing import Any

from diloco_learner.events import (
    AnchorReady,
    BeatSeen,
    Begin,
    Contribute,
    Evaluate,
    PullSeen,
    Stepped,
    TimePassed,
)
from diloco_learner.exchange.exchange import Exchange
from diloco_learner.exchange.leaders import Leaders
from diloco_learner.exchange.pulls import AllPulls
from diloco_shared.protocol.messages import Beat, Grant, Pull, Restored, Stamp
from diloco_shared.spec.algorithm import Algorithm
from diloco_shared.spec.run import RunSpec


def stamp(steps: int) -> Stamp:
    return Stamp(round=steps // 4, steps=steps, fraction=0.1, fraction_per_step=0.01)


def beat(shard: int, versions: tuple[int, ...], **changed: Any) -> Beat:
    fields: dict[str, Any] = {
        "run": "t",
        "epoch": 0,
        "term": 1,
        "state": "running",
        "reason": f"of shard {shard}",
        "versions": tuple(v if p % 2 == shard else -1 for p, v in enumerate(versions)),
        "stamp": stamp(8),
        "live": ("a",),
        "shard": shard,
    }
    return Beat(**{**fields, **changed})


def heard(leaders: Leaders, *beats: Beat) -> Beat:
    told = [leaders.beat(b) for b in beats][-1]
    assert told is not None
    return told


def test_one_shard_speaks_for_itself() -> None:
    alone = beat(0, (1, 2))
    assert Leaders("a", 1).beat(alone) is alone


def test_nothing_is_told_until_every_leader_was_heard() -> None:
    leaders = Leaders("a", 2)
    assert leaders.beat(beat(0, (3, 3, 3, 3))) is None
    both = heard(leaders, beat(1, (2, 2, 2, 2), term=4, stamp=stamp(4), live=("b",)))
    assert both.versions == (3, 2, 3, 2) and both.initializer == ""
    assert (both.term, both.terms, both.stamp.steps, both.live) == (5, (1, 4), 4, ("a", "b"))
    assert leaders.beat(beat(7, (9, 9, 9, 9))) is None, "there is no such shard"


def test_who_is_asked_for_the_parameters_of_one_shard_hears_it_whatever_another_waits_for() -> None:
    """Nobody steps before every shard has parameters: each would wait for the other."""
    leaders = Leaders("a", 2)
    waits = beat(1, (-1, 0), state="waiting", reason="for the first step of a: they recover")
    both = heard(leaders, waits, beat(0, (-1, -1), state="bootstrapping", initializer="a"))
    assert (both.state, both.initializer) == ("bootstrapping", "a")


def test_a_deposed_or_overtaken_beat_changes_nothing() -> None:
    leaders = Leaders("a", 2)
    heard(leaders, beat(0, (3, 3)), beat(1, (2, 2), term=2))
    assert leaders.beat(beat(1, (9, 9), term=1)) is None
    assert leaders.beat(beat(0, (2, 2))) is None
    assert heard(leaders, beat(0, (4, 4))).versions == (4, 2)


def test_the_run_is_what_its_least_shard_is_and_over_once_all_are() -> None:
    leaders = Leaders("a", 2)
    heard(leaders, beat(0, (3, 3)), beat(1, (2, 2)))
    slow = heard(leaders, beat(1, (2, 2), state="starved", reason="starved (0 of 1)"))
    assert (slow.state, slow.reason) == ("starved", "starved (0 of 1)")
    heard(leaders, beat(1, (2, 2)))
    assert heard(leaders, beat(0, (3, 3), state="finished", evaluator="a")).state == "finishing"
    over = heard(leaders, beat(1, (3, 3), state="finished", evaluator="b"))
    assert (over.state, over.evaluator) == ("finished", "a")
    assert over.versions == (3, 3)


def test_a_run_is_not_over_while_a_shard_is_behind_with_an_epoch() -> None:
    """Its last versions are still to be published in the new one."""
    leaders = Leaders("a", 2)
    over = heard(leaders, beat(0, (3, 3), state="stopped"), beat(1, (2, 2), state="stopped"))
    assert over.state == "stopped"
    behind = heard(leaders, beat(1, (2, 2), state="stopped", epoch=1, term=2))
    assert (behind.state, behind.versions) == ("finishing", (-1, 2))
    assert heard(leaders, beat(0, (3, 3), state="stopped", epoch=1)).state == "stopped"


def test_of_an_older_epoch_nothing_counts() -> None:
    leaders = Leaders("a", 2)
    heard(leaders, beat(0, (3, 3)), beat(1, (2, 2)))
    back = Restored(epoch=1, serial=1, source="t/000001")
    raised = heard(leaders, beat(0, (1, 1), epoch=1, restored=back, checkpoint=4))
    assert (raised.epoch, raised.versions) == (1, (1, -1))
    assert (raised.restored, raised.checkpoint) == (back, 4)
    assert heard(leaders, beat(1, (1, 1), epoch=1)).versions == (1, 1)


def test_terms_of_an_older_epoch_fence_nobody() -> None:
    """On a hub that was put back from a backup, terms of a new epoch may be lower than before."""
    leaders = Leaders("a", 2)
    pulls = AllPulls("a", 0, Algorithm(fragments=2, shards=2, sync_every_steps=2))
    before = heard(leaders, beat(0, (3, 3), term=9), beat(1, (2, 2), term=7))
    assert (before.term, before.terms) == (16, (9, 7))
    raised = heard(leaders, beat(0, (1, 1), epoch=1, term=2))
    assert (raised.term, raised.terms) == (2, (2, 0))
    pulls.lead(raised.epoch, raised.terms)
    followed = heard(leaders, beat(1, (1, 1), epoch=1, term=3))
    assert (followed.term, followed.terms) == (5, (2, 3))
    assert not pulls.deposed(followed.epoch, followed.terms)


def test_whoever_a_shard_asks_for_initial_parameters_is_asked() -> None:
    leaders = Leaders("b", 2)
    none = (-1, -1)
    leaders.beat(beat(0, none, state="bootstrapping", initializer="a"))
    told = heard(leaders, beat(1, none, state="bootstrapping", initializer="b"))
    assert (told.state, told.initializer) == ("bootstrapping", "b")


def grant(shard: int, versions: tuple[int, ...], **changed: Any) -> Grant:
    fields: dict[str, Any] = {
        "learner": "a",
        "incarnation": 2,
        "nonce": "n-1",
        "accepted": True,
        "reason": "",
        "epoch": 0,
        "term": 1,
        "versions": tuple(v if p % 2 == shard else -1 for p, v in enumerate(versions)),
        "donor": "d" if shard == 0 else "",
        "stamp": stamp(8),
        "shard": shard,
    }
    return Grant(**{**fields, **changed})


def test_a_grant_is_complete_once_every_shard_has_accepted_in_one_epoch() -> None:
    leaders = Leaders("a", 2)
    assert leaders.grant(grant(1, (2, 2), stamp=stamp(4))) is None
    both = leaders.grant(grant(0, (3, 3)))
    assert both is not None
    assert (both.versions, both.donor, both.stamp.steps) == ((3, 2), "d", 4)
    assert leaders.grant(grant(0, (3, 3), nonce="n-2")) is None, "another attempt"
    assert leaders.grant(grant(1, (3, 3), nonce="n-2", epoch=1)) is None, "of another epoch"
    assert leaders.grant(grant(0, (3, 3), nonce="n-2", epoch=1)) is not None
    refused = grant(1, (2, 2), accepted=False, reason="superseded")
    assert leaders.grant(refused) is refused, "one refusal is enough"


SPEC = RunSpec.model_validate(
    {
        "name": "t",
        "algorithm": {"fragments": 2, "shards": 2, "sync_every_steps": 8},
        "budget": {"steps": 80},
    }
)


def pull(p: int, term: int, round_: int = 0) -> PullSeen:
    asked = {"epoch": 0, "round": round_, "fragment": p, "participants": ("a",)}
    return PullSeen(Pull(term=term, timeout_s=9.0, **asked))


def test_each_shard_numbers_its_rounds_and_terms_by_itself() -> None:
    """I2: answered once each; a new leader of one shard voids nothing of the other."""
    leaders = Leaders("a", 2)
    exchange = Exchange(SPEC, "a", 0, Begin(0, 0, (0, 0), stamp(0)), 0.0)
    leaders.beat(beat(0, (0, 0)))
    exchange.handle(BeatSeen(heard(leaders, beat(1, (0, 0), term=5))), 0.0)

    def answers(*events: Any) -> list[tuple[int, int, int]]:
        effects = exchange.handle(Stepped(8, 1.0, 0.1, 0.0, None), 1.0)
        for event in events:
            effects += exchange.handle(event, 1.0)
        effects += exchange.handle(TimePassed(), 1.0)
        return [(e.fragment, e.round, e.term) for e in effects if isinstance(e, Contribute)]

    assert answers(pull(0, 1), pull(1, 5)) == [(0, 0, 1), (1, 0, 5)]
    assert answers(pull(0, 1), pull(1, 5)) == [], "repeats"
    newer = BeatSeen(heard(leaders, beat(1, (0, 0), term=6)))
    assert answers(pull(0, 1, 1), newer, pull(1, 5, 1), pull(1, 6)) == [(0, 1, 1), (1, 0, 6)]
    published = AnchorReady(0, 0, 1, 3, stamp(12), {})
    assert answers(pull(0, 1, 3), pull(1, 6, 3), published) == [(1, 3, 6)], "over for shard 0"


def entered(p: int, steps: int) -> AnchorReady:
    """The keyframe with which a shard begins epoch 1."""
    return AnchorReady(1, p, 1, -1, stamp(steps), {})


def raised(shard: int, steps: int) -> Beat:
    return beat(shard, (1, 1), epoch=1, term=9, stamp=stamp(steps), evaluator="a")


def told_by(*first: AnchorReady | Beat) -> Exchange:
    """A learner of a run at step 40, which then hears this of a new epoch."""
    exchange, leaders = Exchange(SPEC, "a", 0, Begin(0, 0, (0, 0), stamp(40)), 0.0), Leaders("a", 2)
    before = [beat(shard, (0, 0), stamp=stamp(40), evaluator="a") for shard in (0, 1)]
    for heard_of in (*before, *first):
        if isinstance(heard_of, AnchorReady):
            exchange.handle(heard_of, 0.0)
        elif (of_all := leaders.beat(heard_of)) is not None:
            exchange.handle(BeatSeen(of_all), 0.0)
    return exchange


def test_a_new_epoch_is_not_placed_by_the_fastest_shard() -> None:
    """Else learners of one run train at different rates until the slowest shard is as far."""
    assert told_by(entered(0, 48)).position()[0] == 40, "no farther than it was thought to be"
    exchange = told_by(entered(0, 32))
    assert exchange.position()[0] == 32
    exchange.handle(entered(1, 24), 0.0)
    assert exchange.may_step and exchange.position()[0] == 32, "one shard of several says that"
    both = told_by(entered(0, 32), entered(1, 24), raised(0, 32), raised(1, 24))
    assert (both.position()[0], both.anchor_stamp.steps) == (24, 24)
    assert told_by(raised(0, 32), raised(1, 24)).position()[0] == 24
    assert told_by(raised(0, 48), raised(1, 44)).position()[0] == 44, "they went on meanwhile"


def test_once_every_shard_has_spoken_the_place_does_not_go_back() -> None:
    exchange = told_by(raised(0, 32), raised(1, 24), raised(1, 28), raised(0, 24))
    assert exchange.position()[0] == 28


def test_nothing_is_evaluated_before_every_shard_has_said_where_the_run_is() -> None:
    exchange = told_by(entered(0, 32), entered(1, 24))
    stepped = Stepped(8, 1.0, 0.1, 0.0, None)
    effects = exchange.handle(stepped, 1.0)
    leaders = Leaders("a", 2)
    leaders.beat(raised(0, 32))
    effects += exchange.handle(BeatSeen(heard(leaders, raised(1, 24))), 1.0)
    assert not [e for e in effects if isinstance(e, Evaluate)]
    (evaluation,) = [e for e in exchange.handle(stepped, 2.0) if isinstance(e, Evaluate)]
    assert evaluation.stamp == stamp(24)
