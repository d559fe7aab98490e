"""Islands of several hosts in whole worlds: a trouble strikes, the island ends and is whole again.

And each rule of an island is broken once in the product, or in what stands for its devices: the
world must name it (I13).
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from diloco_learner.hosts import carrying_io, plan, shares
from diloco_learner.hosts.carrying_io import ERRAND, Carrier, Carriers
from diloco_learner.hosts.giving_io import SharedStateUpload
from diloco_learner.hosts.held_anchors import OwnParts
from diloco_learner.hosts.whole import Hearing, WholeIsland
from diloco_learner.recovery.donating import Handing
from diloco_simulator.checkers.islands import SLACK_S, IslandLife, IslandWatch
from diloco_simulator.checkers.promises import Report
from diloco_simulator.islands import processes, trainer
from diloco_simulator.troubles import islands as troubles
from diloco_simulator.troubles.islands import IslandTroubles
from diloco_simulator.worlds import constants
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import ISLANDS, Options
from diloco_simulator.worlds.tiny import Part, TinyTrainer
from diloco_simulator.worlds.world import WorldResult, played

# Two learners of several hosts, and one of a single process.
CALM = Options.calm(
    learners=3, quorum=2, steps=24, safety_s=30.0, snapshot_every_rounds=3, hosts=(2, 1, 3)
)
Strike = Callable[[IslandTroubles], object]


def calm(**changes: Any) -> WorldResult:
    return played(Case(1, CALM.changed(**changes)))


def struck(patch: pytest.MonkeyPatch, *strikes: Strike, **changes: Any) -> WorldResult:
    """These troubles come one after another, 12 virtual seconds apart."""

    def planned(self: IslandTroubles) -> None:
        for n, strike in enumerate(strikes):
            self.world.loop.call_later(5.0 + 12.0 * n, strike, self)

    patch.setattr(IslandTroubles, "plan", planned)
    return calm(**changes)


def came_back(found: WorldResult, *states: str) -> None:
    """Sound, and the island that ended is whole again and was merged (I10)."""
    assert found.violations == [] and found.rounds > 0
    for state in (*states, "islands ended", "islands whole again", "told: recovered"):
        assert found.counts[state], state
    assert found.looks["I13"] and found.looks["I10"]


@pytest.mark.parametrize("codec", [pytest.param("bf16", marks=pytest.mark.long), "int4"])
def test_a_calm_world_with_islands_is_sound(codec: str) -> None:
    found = calm(codec_up=codec)
    assert found.violations == [] and found.rounds > 0 and found.looks["I13"] > 100
    assert found.counts["islands whole"] == 2 and not found.counts["islands ended"]


@pytest.mark.parametrize("wordless", [0.0, pytest.param(1.0, marks=pytest.mark.long)])
def test_a_host_that_dies_ends_the_island(monkeypatch: pytest.MonkeyPatch, wordless: float) -> None:
    """Whether its connections are closed, or its machine is only silent."""
    monkeypatch.setattr(troubles, "WORDLESS", wordless)
    found = struck(monkeypatch, lambda t: t.dies())
    came_back(found, "islands: a host dies", "islands lost a host")
    assert bool(found.counts["islands: silent past the limit"]) == bool(wordless)


def test_a_host_dies_with_an_order_told_and_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    found = struck(monkeypatch, lambda t: t.dies_untaken())
    came_back(found, "islands: a host dies with an order told and not taken")


def test_half_a_contribution_is_never_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host dies with its part encoded and not given."""
    found = struck(monkeypatch, lambda t: t.dies_encoded())
    came_back(found, "islands: a host dies with its part not given")


@pytest.mark.parametrize(
    ("strike", "state"),
    [
        (IslandTroubles.dies_keeping, "islands: a host dies with an anchor not adopted"),
        (IslandTroubles.dies_giving, "islands: a host dies in the middle of a gather"),
    ],
)
def test_a_host_dies_with_its_part_of_an_anchor(
    monkeypatch: pytest.MonkeyPatch, strike: Strike, state: str
) -> None:
    found = struck(monkeypatch, strike)
    came_back(found, state)


def test_process_0_dies_in_the_middle_of_a_put(monkeypatch: pytest.MonkeyPatch) -> None:
    found = struck(monkeypatch, lambda t: t.dies_putting())
    assert found.violations == [] and found.counts["islands whole again"]
    assert found.counts["islands: process 0 dies in the middle of a put"]


def test_a_host_that_stands_still_for_a_while_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = struck(
        monkeypatch, lambda t: t.stands_still_for(t._somebody(), (0.7, 0.8)), host_silence_s=4.0
    )
    assert found.violations == [] and not found.counts["islands ended"]
    assert found.counts["islands: a host stands still for a while"]
    assert found.counts["told: straggling-host"]


def test_a_host_that_stands_still_for_long_ends_the_island(monkeypatch: pytest.MonkeyPatch) -> None:
    found = struck(monkeypatch, lambda t: t.stands_still_for(t._somebody(), troubles.LONG))
    states = ("islands: a host stands still for long", "islands: silent past the limit")
    came_back(found, *states)


def test_a_host_whose_link_is_slow_keeps_the_others_waiting_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = struck(monkeypatch, lambda t: t.slow(), lambda t: t.slow())
    assert found.violations == [] and not found.counts["islands ended"]
    assert found.counts["islands: a host's link is slow"] == 2


def test_a_host_that_is_told_to_stop_ends_the_island_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = struck(monkeypatch, lambda t: t.told_to_stop())
    came_back(found, "islands: a host is told to stop")
    assert not found.counts["islands lost a host"]


@pytest.mark.long
def test_process_0_that_stands_still_is_left_and_all_begin_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def freeze(t: IslandTroubles) -> None:
        leading = t.islands[0].leading
        assert leading is not None
        leading.process.freeze()
        leading.cable.later(8.0, leading.process.thaw)

    found = struck(monkeypatch, freeze)
    came_back(found, "islands: process 0 silent past the limit")


def test_process_0_that_is_gone_without_a_word_is_missed_by_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "WORDLESS", 1.0)

    def die(t: IslandTroubles) -> None:
        machine = t.islands[0].machine
        assert machine is not None
        t.world.crash(machine, 1.0)

    found = struck(monkeypatch, die)
    assert found.violations == [] and found.counts["islands whole again"]
    assert found.counts["islands: process 0 gone without a word"]
    assert found.counts["islands: process 0 silent past the limit"]


# --------------------------------------------------------------------------------------------------
# Hosts that carry their shares to and from the hub.

# Of all hosts of both islands.
CARRIERS = 3


def carried(**changes: Any) -> WorldResult:
    options = CALM.changed(carriers=True, **changes)
    return played(Case(1, options, constants.of_carriers(1)))


def troubled(patch: pytest.MonkeyPatch, strike: Strike, **changes: Any) -> WorldResult:
    """Once every fragment has been merged."""

    def planned(self: IslandTroubles) -> None:
        self.world.loop.call_later(8.0, strike, self)

    patch.setattr(IslandTroubles, "plan", planned)
    return carried(**changes)


def all_cut_off(t: IslandTroubles) -> None:
    for follower in t.followers:
        t.cut_off(follower)


@pytest.mark.parametrize("codec", ["bf16", pytest.param("int4", marks=pytest.mark.long)])
def test_hosts_carry_their_shares_and_fetch_runs_of_anchors(codec: str) -> None:
    found = carried(codec_up=codec)
    assert found.violations == [] and found.rounds > 0 and found.looks["I13"] > 100
    assert found.counts["islands: a share carried"] > found.rounds
    assert found.counts["islands: chunks fetched by another host"] > found.rounds
    assert not found.counts["islands: a share not stored by its host"]


def test_a_host_without_the_hub_costs_one_contribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(troubles, "CUT_FOR_S", (25.0, 25.0))
    monkeypatch.setattr(carrying_io, "REST_S", 60.0)
    values = constants.of_carriers(1)
    values.pop(f"{carrying_io.__name__}.REST_S")
    monkeypatch.setattr(constants, "of_carriers", lambda seed: values)
    found = troubled(monkeypatch, all_cut_off, overlap_steps=1)
    assert found.violations == [] and not found.counts["islands ended"]
    assert 0 < found.counts["told: upload-abandoned"] <= CARRIERS
    assert found.counts["islands: a carrier left alone"]
    assert found.counts["islands: a share carried"]


def test_what_a_host_cannot_give_away_process_0_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer asks for moments, and no other host of its donor reaches the hub."""
    monkeypatch.setattr(troubles, "CUT_FOR_S", (60.0, 60.0))
    # Else the newcomer is given the copy of one, which process 0 has.
    monkeypatch.setattr(Handing, "keep", lambda *_, **__: [])

    def strike(t: IslandTroubles) -> None:
        t._at("told Share", lambda island, index: all_cut_off(t))
        t.world.crash(t.world.learners[1], 1.0)

    found = troubled(monkeypatch, strike)
    assert found.violations == [] and found.counts["told: donated"]
    assert found.counts["islands: a share that process 0 stored instead"]


def test_a_host_that_finds_no_hub_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins anew while its link is cut, and its share goes through process 0 meanwhile."""
    monkeypatch.setattr(troubles, "CUT_FOR_S", (25.0, 25.0))

    def strike(t: IslandTroubles) -> None:
        t.cut_off(t.followers[0])
        t.dies(t.followers[0])

    found = troubled(monkeypatch, strike)
    came_back(found, "islands: a carrier is cut off", "islands: a share carried")


@pytest.mark.parametrize(
    ("strike", "state"),
    [
        (IslandTroubles.dies_carrying, "islands: a host dies in the middle of its share"),
        (IslandTroubles.dies_fetching, "islands: a host dies in the middle of a run"),
    ],
)
def test_a_host_dies_with_what_it_carries(
    monkeypatch: pytest.MonkeyPatch, strike: Strike, state: str
) -> None:
    came_back(troubled(monkeypatch, strike), state)


def test_a_host_whose_connection_breaks_carries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(t: IslandTroubles) -> None:
        for follower in t.followers:
            t.loses_the_hub(follower)

    found = troubled(monkeypatch, strike)
    assert found.violations == [] and not found.counts["islands ended"]
    assert found.counts["islands: a carrier loses the hub"] == CARRIERS
    assert found.counts["islands: a share carried"]


def test_islands_are_drawn_from_dice_of_their_own() -> None:
    """Worlds without islands are as they were: what else a seed draws does not depend on them."""
    drawn = [Options.drawn(seed) for seed in range(300)]
    with_islands = [o for o in drawn if o.hosts]
    assert 0.7 * ISLANDS * 300 < len(with_islands) < 1.3 * ISLANDS * 300
    assert {n for o in with_islands for n in o.hosts} == {1, 2, 3, 4}
    fields = ("host_deaths", "host_hangs", "host_stops", "slow_hosts", "carriers", "cut_carriers")
    for field in fields:
        assert any(getattr(o, field) for o in with_islands)
        assert not any(getattr(o, field) for o in drawn if not o.hosts)


# --------------------------------------------------------------------------------------------------
# What breaks a rule is seen.


def of_orders_that_are_left_out(patch: pytest.MonkeyPatch) -> None:
    """And the rule that would notice it is gone too."""
    tell = processes.Leading.tell

    def forgetful(self: processes.Leading, order: plan.Order, parts: Any = None, **of: Any) -> int:
        if isinstance(order, plan.Adopt) and self.whole.told > 20:
            self.whole.told += 1
        return tell(self, order, parts, **of)

    patch.setattr(processes.Leading, "tell", forgetful)
    patch.setattr(plan.Following, "take", lambda self, number: None)


def of_steps_that_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    carry_out = trainer.FollowingTrainer.carry_out

    async def forgetful(self: Any, number: int, order: plan.Order, data: Any) -> Any:
        found = await carry_out(self, number, order, data)
        if isinstance(order, plan.Step) and number > 30 and self.part.index == 1:
            self.tiny.moments -= 1
        return found

    patch.setattr(trainer.FollowingTrainer, "carry_out", forgetful)


def of_half_a_contribution(patch: pytest.MonkeyPatch) -> None:
    """What has not come is taken for nothing but zeros."""
    answers, tells = WholeIsland.answers, WholeIsland.tells
    contributions: set[int] = set()

    def noted(self: WholeIsland, order: plan.Order, now: float, of: int | None = None) -> Any:
        found = tells(self, order, now, of)
        if isinstance(order, plan.Contribute):
            contributions.add(found[0])
        return found

    def early(self: WholeIsland, number: int) -> Any:
        if number in contributions:
            for index in self.others:
                self.came.setdefault((number, index), b"")
        return answers(self, number)

    def forgiving(spans: Any, dtype: Any, data: Any) -> Any:
        import numpy as np

        size = trainer_size(spans, dtype)
        whole = bytes(memoryview(data).cast("B")) if len(data) else b""
        return split(spans, np.dtype(dtype), whole.ljust(size, b"\0")[:size])

    from diloco_learner.hosts.parts import size_of as trainer_size
    from diloco_learner.hosts.parts import split

    patch.setattr(WholeIsland, "answers", early)
    patch.setattr(WholeIsland, "tells", noted)
    patch.setattr(trainer, "split", forgiving)


def of_parts_of_another_round(patch: pytest.MonkeyPatch) -> None:
    """A host gives what it gave the time before."""
    sent = TinyTrainer.sent
    given: dict[int, bytes] = {}

    def old(self: TinyTrainer, p: int, round_: int, whole_F: Any) -> bytes:
        payload = sent(self, p, round_, whole_F)
        if self.spans[0] == Part(1, 2).of(self.layout.sizes[0]):
            before = given.get(p, payload)
            given[p] = payload
            return before
        return payload

    patch.setattr(TinyTrainer, "sent", old)


def of_another_anchor(patch: pytest.MonkeyPatch) -> None:
    """A host takes the oldest one that it keeps of a fragment."""
    of = OwnParts.of

    def oldest(self: OwnParts, key: int, fragment: int) -> Any:
        alike = [k for k, one in self.kept.items() if one.fragment == fragment]
        return of(self, min(alike), fragment)

    patch.setattr(OwnParts, "of", oldest)


def of_silence(patch: pytest.MonkeyPatch) -> None:
    """Nobody is ever missed; and a machine goes without a word."""
    patch.setattr(Hearing, "over", lambda self, now: False)
    patch.setattr(troubles, "WORDLESS", 1.0)
    _dies(patch)


def of_halves_that_live_on(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WholeIsland, "lose", lambda self, why: False)
    _dies(patch)


def _dies(patch: pytest.MonkeyPatch) -> None:
    def planned(self: IslandTroubles) -> None:
        self.world.loop.call_later(5.0, self.dies)

    patch.setattr(IslandTroubles, "plan", planned)


def of_shares_that_nobody_stored(patch: pytest.MonkeyPatch) -> None:
    """A host says that its share is there, and has forgotten it."""

    async def lying(self: Carrier, number: int, *told: Any) -> None:
        self.shares.to_store(number)
        self.say(ERRAND, "carried", number, "")

    patch.setattr(Carrier, "_put", lying)


def of_carriers_that_are_asked_again(patch: pytest.MonkeyPatch) -> None:
    """At once after they have failed."""
    patch.setattr(Carriers, "ready", lambda self: tuple(sorted(self.known)))
    patch.setattr(troubles, "CUT_FOR_S", (25.0, 25.0))

    def planned(self: IslandTroubles) -> None:
        self.world.loop.call_later(8.0, all_cut_off, self)

    patch.setattr(IslandTroubles, "plan", planned)


def of_shares_that_are_kept_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shares, "KEPT_MAX", dict.fromkeys(shares.KEPT_MAX, 10**6))
    patch.setattr(SharedStateUpload, "let_go", lambda self: None)


def of_a_share_of_other_bytes(patch: pytest.MonkeyPatch) -> None:
    """A host hashes what it does not have."""
    parts_of = trainer.parts_of

    def other(payload: Any, lying: Any, host: int) -> Any:
        return [memoryview(bytes(len(part))) for part in parts_of(payload, lying, host)]

    patch.setattr(trainer, "parts_of", other)


BREAKS_OF_CARRIERS = (
    (of_shares_that_nobody_stored, "and stored no chunk"),
    (of_carriers_that_are_asked_again, "is to carry again"),
    (of_shares_that_are_kept_for_ever, "shares of what it carries"),
    (of_a_share_of_other_bytes, "make another whole"),
)


@pytest.mark.parametrize(
    ("broken", "says"), [pytest.param(b, s, id=b.__name__) for b, s in BREAKS_OF_CARRIERS]
)
def test_a_broken_rule_of_carriers_is_named(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None], says: str
) -> None:
    broken(monkeypatch)
    found = carried(fragments=4, overlap_steps=1)
    assert any(v.startswith("I13") and says in v for v in found.violations), found.violations[:5]


BREAKS = (
    (of_orders_that_are_left_out, "takes up order"),
    (of_steps_that_are_forgotten, "after order"),
    (of_half_a_contribution, "make another whole"),
    (of_parts_of_another_round, "make another whole"),
    (of_another_anchor, "takes another anchor than order"),
    (of_silence, "after one of its hosts died"),
    (of_halves_that_live_on, "after one of its hosts died"),
)


# Their worlds wait for their end in vain.
LONG = (of_silence, of_halves_that_live_on)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        pytest.param(
            broken, says, id=broken.__name__, marks=[pytest.mark.long] if broken in LONG else []
        )
        for broken, says in BREAKS
    ],
)
def test_a_broken_rule_of_an_island_is_named(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None], says: str
) -> None:
    broken(monkeypatch)
    found = calm(codec_up="int4")
    assert any(v.startswith("I13") and says in v for v in found.violations), found.violations[:5]


# --------------------------------------------------------------------------------------------------
# The checker by itself.


class Scene:
    """Time, and what was told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.told: list[str] = []
        self.due: list[tuple[float, Callable[..., object], tuple[Any, ...]]] = []
        self.killed = self.frozen = False
        self.thawed_at = 0.0
        self.hosts, self.silence_s = 2, 2.0
        self.followers: dict[int, Any] = {}

    def later(self, seconds: float, do: Callable[..., object], *args: Any) -> None:
        self.due.append((self.now + seconds, do, args))

    def life(self) -> IslandLife:
        report = Report(lambda invariant, text: self.told.append(f"{invariant} {text}"))
        watch = IslandWatch(report, Counter(), lambda: self.now, self.later)
        return watch.begins("a", "a", self, self)

    def until_due(self) -> None:
        at, do, args = self.due.pop(0)
        self.now = at
        do(*args)


def test_who_acts_on_without_a_host_is_named_and_who_stood_still_is_given_time() -> None:
    scene = Scene()
    life = scene.life()
    life.died(scene.now)
    life.acts()
    scene.now += scene.silence_s + SLACK_S
    life.acts()
    assert scene.told == []
    scene.thawed_at = scene.now
    scene.now += 1.0
    life.acts()
    assert scene.told == [], "it stood still, and may hear of it now"
    scene.now += scene.silence_s + SLACK_S
    life.acts()
    assert len(scene.told) == 1 and "acts" in scene.told[0]


def test_who_lives_on_without_a_host_is_named_once_it_could_have_noticed() -> None:
    scene = Scene()
    scene.life().died(scene.now)
    scene.frozen = True
    scene.until_due()
    scene.frozen, scene.thawed_at = False, scene.now + 3.0
    scene.until_due()
    assert scene.told == [], "it stood still, and has time from then on"
    scene.until_due()
    assert len(scene.told) == 1 and "lives on" in scene.told[0]


def test_what_was_put_and_never_put_together_is_named() -> None:
    scene = Scene()
    life = scene.life()
    life.gathered(b"whole", b"whole", 0, 3)
    assert life.putting
    life.watch.stored("a", 0, 3, b"whole", lies=False)
    life.watch.stored("a learner of one process", 0, 3, b"anything", lies=False)
    life.watch.stored("a", 0, 3, b"half", lies=True)
    assert scene.told == [] and not life.putting
    for round_, payload in ((3, b"half"), (5, b"whole")):
        life.watch.stored("a", 0, round_, payload, lies=False)
        said = f"I13 a has put for round {round_} what was never put together"
        assert scene.told.pop() == said
