"""The plan that process 0 tells: orders as bytes, in order; and who keeps the others waiting."""

import msgpack
import pytest

from diloco_learner.hosts import plan
from diloco_learner.hosts.plan import BadOrder, Following, HostPace, OutOfOrder, Stragglers

ORDERS: list[plan.Order] = [
    plan.Prepare('{"name": "r"}', "fsdp=2", -1),
    plan.Begin(),
    plan.WarmUp(8),
    plan.WarmRows(),
    plan.Step(0.1 + 0.2, False, (8, 17), "int32"),
    plan.Hold(812, 23, 40 << 20, (787, 788, 811)),
    plan.Gather(812),
    plan.Adopt(3, 0.5, 812),
    plan.Contribute(3, 41, 1 << 19, (1, 2)),
    plan.Decided(3, 41, True),
    plan.Read(0),
    plan.Copy("0/mu/layer_00/mlp/up_DxF"),
    plan.Share(1 << 19, (1, 2, 3)),
    plan.ShareFragment(23, 1 << 19, (1, 2, 3)),
    plan.Load("0/count", (), "int32"),
    plan.Look("r.1936f81605d3/frankfurt-1", "5f7f2c1e9f6a4b0d"),
    plan.Keep("288000000000000000010000006720"),
    plan.Restore("288000000000000000010000006720"),
    plan.Anew(),
    plan.Compile(17, (5, 2)),
    plan.Assemble(),
    plan.Assembled(2, 812),
    plan.Evaluate((5, 17), "int32"),
    plan.LetGo(),
    plan.Leave(),
    plan.Bye(),
]


def test_every_order_is_the_same_on_the_other_side() -> None:
    assert {type(order) for order in ORDERS} == set(plan.Order.__args__)
    for number, order in enumerate(ORDERS, 1):
        data = plan.encode(number, order)
        assert plan.decode(data) == (number, order)
        assert len(data) < 100, "a plan is small, whatever is done with it"


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1],
        [1, "Nothing"],
        ["1", "Begin"],
        [1, "Begin", 2],
        [1, "Adopt", 3, 0.5],
        [1, "Adopt", 3, 1, 7],  # no float
        [1, "Adopt", True, 1.0, 7],
        [1, "Hold", 7, 3, 0, [-1]],
        [1, "Read", "0"],
        [1, "Step", 0.1, 0, [8, 17], "int32"],
        [1, "Step", 0.1, False, [8, -17], "int32"],
        [1, "Step", 0.1, False, 8, "int32"],
        {"a": 1},
        7,
    ],
)
def test_what_is_no_order_is_refused(values: object) -> None:
    with pytest.raises(BadOrder):
        plan.decode(msgpack.packb(values))


def test_bytes_that_are_nothing_at_all_are_refused() -> None:
    for data in (b"", b"\xc1", b"\x93\x01", plan.encode(1, plan.Begin())[:-1]):
        with pytest.raises(BadOrder):
            plan.decode(data)


def test_an_order_that_is_missing_or_comes_twice_is_noticed() -> None:
    following = Following()
    following.take(1)
    following.take(2)
    for number in (2, 4, 1):
        with pytest.raises(OutOfOrder, match=f"order {number} came after order 2"):
            following.take(number)
    following.take(3)


def test_only_steps_tell_who_is_late() -> None:
    pace = HostPace()
    pace.told(1, 10.0, step=False)
    pace.told(2, 10.0, step=True)
    assert pace.behind_s(13.0) == 3.0
    assert pace.taken(1, 0.5, 14.0) == 0.0 and pace.late_s == 0.0
    assert pace.behind_s(14.0) == 4.0
    assert pace.taken(2, 0.5, 12.0) == 2.0
    assert pace.late_s == pytest.approx(plan.SHARE * 2.0)
    assert pace.waited_s == pytest.approx(plan.SHARE * 0.5)
    assert pace.behind_s(99.0) == 0.0


def test_one_word_of_several_orders_counts_for_all_of_them() -> None:
    pace = HostPace()
    for number in (1, 2, 3):
        pace.told(number, float(number), step=True)
    assert pace.taken(2, 0.0, 5.0) == 3.0  # of the newest one it tells of
    assert pace.behind_s(5.0) == 2.0


def test_a_host_that_keeps_the_others_waiting_is_told_by_name_and_seldom() -> None:
    stragglers = Stragglers()
    stragglers.late("host 1 (a)", plan.LATE_TOLD_S / 2)
    assert stragglers.tell(0.0) == ""
    stragglers.late("host 1 (a)", 1.5)
    stragglers.late("host 2 (b)", 3.0)
    stragglers.late("host 1 (a)", 1.0)
    text = stragglers.tell(1.0)
    assert text == "the island waited for host 2 (b) for 3.0 s and host 1 (a) for 1.5 s"
    stragglers.late("host 1 (a)", 2.0)
    assert stragglers.tell(2.0) == ""
    assert "host 1 (a) for 2.0 s" in stragglers.tell(1.0 + plan.TELL_S)
