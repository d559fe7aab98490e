"""Roles, tokens and rates."""

from diloco_coordinator.access import ROLES, Keyring, Meter, TokenRecord, allows, digest


def test_each_role_may_do_what_the_ones_before_it_may() -> None:
    table = [[allows(role, needed) for needed in ROLES] for role in ROLES]
    assert table == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, True, True],
    ]


def test_a_keyring_knows_tokens_by_their_digests() -> None:
    record = TokenRecord(name="eve", role="viewer", digest=digest("t1"), created_at=0.0)
    keyring = Keyring(digest("root"), {"eve": record})
    assert keyring.role("root") == ("admin", "admin")
    assert keyring.role("t1") == ("eve", "viewer")
    assert keyring.role("t2") is None
    assert keyring.role(record.digest) is None, "the digest is no token"


def test_a_meter_admits_a_burst_and_then_the_rate() -> None:
    meter = Meter(per_s=2.0, burst=3)
    assert [meter.admit("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert meter.admit("b", 0.0) == 0.0, "callers do not share"
    assert meter.admit("a", 0.25) == 0.25, "a refused request costs nothing"
    assert meter.admit("a", 0.5) == 0.0
    assert meter.admit("a", 0.5) == 0.5


def test_a_meter_remembers_a_bounded_number_of_callers() -> None:
    """I12."""
    meter = Meter(per_s=1.0, burst=1, callers_max=2)
    for caller in ("a", "b", "c"):
        meter.admit(caller, 0.0)
    assert list(meter.levels) == ["b", "c"]
