"""Scopes, limits, tokens as they are kept, and rates."""

import pytest
from pydantic import ValidationError

from diloco_coordinator.access import (
    EARLIER_MAX,
    SCOPES,
    Door,
    Keyring,
    Meter,
    Scope,
    TokenRecord,
    digest,
    hindrance,
    origin_of,
    sees,
)


def token(*scopes: Scope, secret: str = "t1", **fields: object) -> TokenRecord:
    given = {"name": "eve", "scopes": scopes or SCOPES, "digest": digest(secret), "created_at": 0.0}
    return TokenRecord.model_validate(given | fields)


def test_no_scope_includes_another() -> None:
    table = [[not hindrance(token(has), needed, now=1.0) for needed in SCOPES] for has in SCOPES]
    assert table == [[has == needed for needed in SCOPES] for has in SCOPES]


@pytest.mark.parametrize(
    ("runs", "sites", "run", "member", "change", "read"),
    [
        # what it is limited to, what it is about, whether it may change and read that
        ((), (), "a", None, True, True),
        ((), (), None, None, True, True),
        ((), (), "a", "m", True, True),
        (("a",), (), "a", None, True, True),
        (("a",), (), "ab", None, False, False),
        (("a*",), (), "ab", None, True, True),
        (("a*",), (), "b", None, False, False),
        (("a",), (), None, None, False, True),  # what is the cluster's is read without foreign runs
        (("a",), (), "a", "m", False, True),  # no site is named
        (("a",), (), "b", "m", False, False),
        (("a",), (), "", "m", False, True),
        ((), ("m",), "a", None, False, True),  # no run is named
        ((), ("m",), "a", "m", True, True),
        ((), ("m*",), "", "m2", True, True),
        ((), ("m*",), "a", "n", False, True),
        ((), ("m",), None, None, False, True),
        (("a",), ("m",), "a", "m", True, True),
        (("a",), ("m",), "b", "m", False, False),  # it works for somebody else
        (("a",), ("m",), "", "m", True, True),
        (("a",), ("*",), "a", "n", True, True),
        (("*",), (), "b", None, True, True),
        (("*",), (), None, None, False, True),  # a limit is a limit
    ],
)
def test_a_limit_closes_what_it_does_not_name(
    runs: tuple[str, ...],
    sites: tuple[str, ...],
    run: str | None,
    member: str | None,
    change: bool,
    read: bool,
) -> None:
    limited = token(runs=runs, sites=sites)
    for scope in ("operate", "fault", "administer"):
        hindered = hindrance(limited, scope, run, member, now=1.0)  # type: ignore[arg-type]
        assert (not hindered) is change
    assert (not hindrance(limited, "read", run, member, now=1.0)) is read
    if run:
        assert sees(limited, run) is (not runs or read)


def test_a_refusal_says_what_the_token_may_and_what_it_is_limited_to() -> None:
    assert hindrance(token("read", "fault"), "operate", now=1.0) == (
        "the token 'eve' may read and fault; this needs operate"
    )
    assert "limited to the runs a b*" in hindrance(token(runs=("a", "b*")), "operate", "c", now=1.0)
    assert "limited to the members m" in hindrance(token(sites=("m",)), "operate", "c", now=1.0)


def test_a_token_ends_when_it_expires() -> None:
    ends = token(expires_at=10.0)
    assert not hindrance(ends, "read", now=9.9)
    assert "rotate" in hindrance(ends, "read", now=10.0)


@pytest.mark.parametrize(
    ("role", "scopes"),
    [
        ("viewer", ("read",)),
        ("operator", ("read", "operate")),
        ("chaos", ("read", "operate", "fault")),
        ("admin", SCOPES),
    ],
)
def test_a_record_of_release_0_2_is_read_as_the_scopes_of_its_rung(
    role: str, scopes: tuple[str, ...]
) -> None:
    """As that release wrote it."""
    stored = f'{{"name":"eve","role":"{role}","digest":"{digest("t1")}","created_at":1.5}}'
    record = TokenRecord.model_validate_json(stored)
    assert record.scopes == scopes and record.expires_at is None and not record.limited
    assert TokenRecord.model_validate_json(record.model_dump_json()) == record


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "emperor", "scopes": None},
        {"scopes": ()},
        {"runs": ("a b",)},
        {"runs": ("*a",)},
        {"sites": ("x",) * 33},
        {"digest": "ä" * 64},
        {"bound_to": "a restriction of a later release"},
    ],
)
def test_a_record_that_says_something_else_opens_nothing(fields: dict[str, object]) -> None:
    given = {"name": "e", "scopes": ("read",), "digest": digest("t"), "created_at": 0.0} | fields
    with pytest.raises(ValidationError):
        TokenRecord.model_validate({k: v for k, v in given.items() if v is not None})


def test_a_keyring_knows_tokens_by_their_digests() -> None:
    record = token("read")
    keyring, admins = Keyring({"eve": record}), (digest("root"), digest("old-root"))
    for secret in ("root", "old-root"):
        found = keyring.find(digest(secret), admins, now=1.0)
        assert found is not None and (found.name, found.scopes) == ("admin", SCOPES)
    assert keyring.find(digest("t1"), admins, now=1.0) == record
    assert keyring.find(digest("t2"), admins, now=1.0) is None
    assert keyring.find(digest(record.digest), admins, now=1.0) is None, "the digest is no token"
    assert keyring.find("", admins, now=1.0) is None


def test_a_rotated_token_is_good_in_both_forms_for_the_overlap_and_as_long_again() -> None:
    old = token("read", expires_at=1000.0)
    new = old.rotated(digest("t2"), now=900.0, overlap_s=60.0)
    assert new.expires_at == 1900.0
    keyring = Keyring({"eve": new})
    assert keyring.find(digest("t1"), (), now=959.0) == new
    assert keyring.find(digest("t1"), (), now=960.0) is None
    assert keyring.find(digest("t2"), (), now=960.0) == new
    assert old.rotated(digest("t2"), now=990.0, overlap_s=60.0).previous_until == 1000.0
    assert new.rotated(digest("t3"), now=1000.0, overlap_s=0.0).previous_digest == ""
    again = new.rotated(digest("t3"), now=920.0, overlap_s=60.0)
    assert again.replaced(950.0) == ((digest("t2"), 980.0), (digest("t1"), 960.0))
    assert again.replaced(970.0) == ((digest("t2"), 980.0),)
    assert again.rotated(digest("t4"), now=930.0, overlap_s=0.0).replaced(930.0) == ()
    for n in range(9):
        again = again.rotated(digest(f"u{n}"), now=930.0, overlap_s=60.0)
        assert TokenRecord.model_validate_json(again.model_dump_json()) == again
    assert len(again.earlier) == EARLIER_MAX
    assert "earlier" not in new.model_dump_json(), "as releases before can read it"
    lasting = token().rotated(digest("t2"), now=1.0, overlap_s=60.0)
    assert (lasting.expires_at, lasting.previous_until) == (None, 61.0)


def test_a_meter_admits_a_burst_and_then_the_rate() -> None:
    meter = Meter(per_s=2.0, burst=3)
    assert [meter.admit("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert meter.admit("b", 0.0) == 0.0, "callers do not share"
    assert meter.admit("a", 0.25) == 0.25, "a refused request costs nothing"
    assert meter.wait_s("a", 0.5) == 0.0 and meter.wait_s("a", 0.5) == 0.0
    assert meter.admit("a", 0.5) == 0.0
    assert meter.admit("a", 0.5) == 0.5


def test_a_meter_remembers_a_bounded_number_of_callers() -> None:
    """I12."""
    meter = Meter(per_s=1.0, burst=1, callers_max=2)
    for caller in ("a", "b", "c"):
        meter.admit(caller, 0.0)
    assert list(meter.levels) == ["b", "c"]


def test_a_door_looks_at_few_attempts_from_one_origin() -> None:
    door = Door(Meter(per_s=1.0, burst=2))
    assert door.knock("there", "anna", 0.0) == 0.0
    assert [door.knock("there", "", 0.0) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert door.knock("there", "bert", 0.0) == 1.0, "a guess that is right is told no sooner"
    assert door.knock("there", "anna", 0.0) == 0.0, "who came in from there before still does"
    assert door.knock("elsewhere", "bert", 0.0) == 0.0
    assert door.knock("there", "bert", 1.0) == 0.0


def test_a_door_remembers_a_bounded_number_of_guests() -> None:
    """I12."""
    door = Door(Meter(per_s=1.0, burst=1), known_max=2)
    for name in ("a", "b", "c"):
        door.knock("here", name, 0.0)
    assert list(door.known) == [("here", "b"), ("here", "c")]


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("testclient", "testclient"),
    ],
)
def test_attempts_count_for_a_household(address: str, origin: str) -> None:
    assert origin_of(address) == origin
