"""Whether an island is whole: who is silent, who is late, and whose answer is missing."""

from typing import Any

import pytest

from diloco_learner.hosts import plan
from diloco_learner.hosts.whole import (
    ANSWERS_MAX,
    BEAT_S,
    ORDER_S_MAX,
    READS,
    Hearing,
    HostLost,
    OfWork,
    Over,
    ReadOn,
    WholeIsland,
)

SILENCE_S = 4.0
STEP = plan.Step(0.1, False, (2, 17), "int32")


def whole(hosts: int = 3, now: float = 100.0) -> WholeIsland:
    found = WholeIsland()
    found.begins({n: f"host {n}" for n in range(1, hosts)}, SILENCE_S, now)
    return found


def looked(of: WholeIsland, until: float, *, alive: tuple[int, ...], since: float = 100.0) -> str:
    """Every BEAT_S these give a sign of life and process 0 looks; what it finds first."""
    now = since
    while now < until:
        now += BEAT_S
        for index in alive:
            of.hears(index, ("alive",), now)
        if why := of.looks(now):
            return why
    return ""


def test_orders_have_numbers_and_are_the_bytes_that_all_hear() -> None:
    of = whole()
    assert of.tells(plan.Begin(), 100.0) == (1, plan.encode(1, plan.Begin()))
    assert of.tells(STEP, 100.0) == (2, plan.encode(2, STEP))


def test_an_answer_is_given_once_all_hosts_gave_theirs_for_that_order() -> None:
    of = whole()
    of.gave(1, 7, b"one of 7")
    assert of.answers(7) is None, "half of it"
    of.gave(2, 8, b"two of 8")
    assert of.answers(7) is None, "of another order"
    of.gave(2, 7, b"two of 7")
    assert of.answers(7) == {1: b"one of 7", 2: b"two of 7"}
    assert of.answers(7) is None, "it is taken once"
    assert of.never_came(8) == f"host 1 gave nothing for order 8 in {ORDER_S_MAX:.0f} s"


def test_an_island_that_is_not_whole_tells_nothing_and_gives_nothing() -> None:
    of = whole()
    for index in (1, 2):
        of.gave(index, 1, b"part")
    assert of.lose("host 2 is gone: its connection is closed")
    assert not of.lose("host 1 is gone"), "the first says it"
    for act in (lambda: of.answers(1), lambda: of.tells(STEP, 100.0)):
        with pytest.raises(HostLost, match=r"host 2 is gone.*The island ends"):
            act()


class Link:
    """Tells into a list."""

    def __init__(self) -> None:
        self.whole, self.told = whole(), list[plan.Order]()
        self.chunk = 7

    def tell(self, order: plan.Order, parts: Any = None, of: int | None = None) -> int:
        number, _ = self.whole.tells(order, 100.0, of)
        self.told.append(order)
        return number


def test_orders_of_work_that_is_over_reach_nobody() -> None:
    """Its thread may still build the model, or wait for an answer."""
    link = Link()
    first = OfWork(link, link.whole.begins_work())
    prepare = plan.Prepare("{}", "data=2", -1)
    assert first.tell(prepare) == 1 and first.chunk == 7
    assert link.whole.leaves(), "the others have prepared"
    second = OfWork(link, link.whole.begins_work())
    assert second.tell(prepare) == 2
    for act in (lambda: first.tell(plan.Begin()), lambda: first.tell(prepare), first.check):
        with pytest.raises(Over, match="the work for this run is over"):
            act()
    second.check()
    assert second.tell(plan.Begin()) == 3, "no number is left out"
    assert link.told == [prepare, prepare, plan.Begin()]
    assert link.whole.leaves() and not link.whole.leaves(), "told once"


def test_what_is_left_of_the_life_before_a_restore_tells_nobody_anything() -> None:
    """An evaluation may still compute: the others hold nothing of it once they are prepared."""
    link = Link()
    before = OfWork(link, link.whole.begins_work())
    prepare = plan.Prepare("{}", "data=2", -1)
    before.tell(prepare)
    after = OfWork(link, link.whole.begins_work())
    after.tell(prepare)
    with pytest.raises(Over):
        before.tell(plan.LetGo())
    after.tell(plan.Begin())
    assert link.told == [prepare, prepare, plan.Begin()]
    assert link.whole.leaves(), "the others know of one run"


def test_one_that_ends_in_order_has_lost_nobody() -> None:
    of = whole()
    of.closing = True
    assert not of.lose("host 1 is gone") and not of.lost


def test_a_host_without_a_sign_of_life_ends_the_island_at_the_limit() -> None:
    of = whole()
    assert looked(of, 100.0 + SILENCE_S, alive=(1,)) == ""
    why = looked(of, 200.0, alive=(1,), since=100.0 + SILENCE_S)
    assert why == f"host 2 is gone: no sign of life for {SILENCE_S:.1f} s"


def test_who_stood_still_himself_takes_nobody_for_dead() -> None:
    of = whole()
    assert looked(of, 102.0, alive=(1, 2)) == ""
    assert of.looks(160.0) == "", "for 58 s this process heard nobody"
    assert looked(of, 160.0 + SILENCE_S, alive=(1,), since=160.0) == ""
    assert "host 2 is gone" in looked(of, 170.0, alive=(1,), since=160.0 + SILENCE_S)


def test_who_stood_still_himself_calls_nobody_late() -> None:
    hearing = Hearing(SILENCE_S, 100.0, 100.0)
    assert hearing.heard(130.0) == 0.0
    hearing = Hearing(SILENCE_S, 100.0, 102.0)
    assert hearing.heard(102.5) == pytest.approx(2.5 - BEAT_S)


def test_a_host_that_stood_still_is_named() -> None:
    of = whole()
    looked(of, 103.0, alive=(1,))
    of.hears(2, ("alive",), 103.0)
    assert of.straggling(103.0) == "the island waited for host 2 for 2.5 s"
    assert of.straggling(104.0) == ""


def test_a_step_that_is_taken_up_late_is_shown_and_named() -> None:
    of = whole()
    number, _ = of.tells(STEP, 100.0)
    looked(of, 102.0, alive=(1, 2))
    of.hears(1, ("taken", number, 0.5), 100.0)
    of.hears(2, ("taken", number, 0.0), 102.0)
    assert of.straggling(102.0) == "the island waited for host 2 for 2.0 s"
    assert of.shown()["host 2"]["late_s"] == pytest.approx(plan.SHARE * 2.0)
    assert of.shown()["host 1"]["waited_s"] == pytest.approx(plan.SHARE * 0.5)


def test_an_order_that_is_never_taken_up_ends_the_island() -> None:
    of = whole()
    of.tells(plan.Copy("0/mu/x"), 100.0)
    of.hears(1, ("taken", 1, 0.0), 100.0)
    assert looked(of, 100.0 + ORDER_S_MAX, alive=(1, 2)) == ""
    why = looked(of, 2000.0, alive=(1, 2), since=100.0 + ORDER_S_MAX)
    assert why.startswith("host 2 has not taken up an order for 900")


@pytest.mark.parametrize("reads", [True, False])
def test_a_host_that_reads_on_may_take_longer_than_one_that_does_nothing(reads: bool) -> None:
    """All hosts of an island read the weights of a large model at once, of one place: meanwhile
    another order waits behind that. One whose place hangs reads no further."""
    of, reading, said, long = whole(2), ReadOn(), list[str](), int(3 * ORDER_S_MAX / BEAT_S)
    for order in (plan.Prepare("{}", "fsdp=2", -1), plan.Leave()):
        of.tells(order, 100.0)
    of.hears(1, ("taken", 1, 0.0), 100.0)
    for beat in range(1, long):
        now = 100.0 + beat * BEAT_S
        if reads and beat % 1000 == 0:
            reading.moved()
        said.append(READS if reading.taken() else "alive")
        of.hears(1, (said[-1],), now)
        if why := of.looks(now):
            assert not reads and why.startswith("host 1 has not taken up an order for 900")
            return
    assert reads and said.count(READS) == (long - 1) // 1000, "once for each time"


def test_a_host_that_reads_no_further_ends_the_island_after_that() -> None:
    of = whole(2)
    of.tells(plan.Leave(), 100.0)
    of.hears(1, (READS,), 900.0)
    assert of.moved_at(1) == 900.0
    assert looked(of, 900.0 + ORDER_S_MAX, alive=(1,), since=900.0) == ""
    why = looked(of, 9000.0, alive=(1,), since=900.0 + ORDER_S_MAX)
    assert why.startswith("host 1 has not taken up an order for 900")


def test_what_a_host_says_of_its_end() -> None:
    of = whole()
    assert of.hears(1, ("failed", "MemoryError: full"), 100.0) == "host 1 failed: MemoryError: full"
    assert of.hears(2, ("stop",), 100.0) == "" and of.hears(1, ("stop",), 100.0) == ""
    assert of.stopped_by == "host 2"


def test_answers_that_nobody_asks_for_are_bounded() -> None:
    of = whole()
    for number in range(1, ANSWERS_MAX + 3):
        of.gave(1, number, b"")
    of.gave(2, 1, b"other hosts have their own limit")
    assert sorted(of.came) == [(1, 2), *((n, 1) for n in range(3, ANSWERS_MAX + 3))]
