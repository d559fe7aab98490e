"""The lease decision by decision, and its promises for any schedule of faults (I7, liveness)."""

from dataclasses import dataclass, field

from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from diloco_syncer.leadership.lease import (
    Away,
    Fitness,
    Lease,
    LeaseKey,
    LeaseLost,
    Look,
    Looked,
    Request,
    Tick,
    Write,
    Written,
)

LEASE_S = 3.0


def fit(name: str = "a", lock: str = "") -> Lease:
    lease = Lease(name, f"boot-{name}", lock or f"lock-{name}", LEASE_S)
    assert lease.handle(Fitness(""), 0.0) == Look()
    return lease


def other(revision: int, holder: str = "b") -> LeaseKey:
    return LeaseKey(holder, "boot-b", "lock-b", revision)


def leading(now: float = 0.0) -> Lease:
    lease = fit()
    assert lease.handle(Looked(None), now) == Write(0)
    lease.handle(Written(1, now), now)
    assert lease.leading
    return lease


def test_nobody_holds_it_and_who_is_fit_takes_it() -> None:
    leading()


def test_one_that_is_not_fit_looks_on() -> None:
    lease = Lease("a", "boot", "lock", LEASE_S)
    assert lease.handle(Tick(), 0.0) == Look()
    assert lease.handle(Looked(None), 0.1) is None
    assert lease.handle(Fitness(""), 0.2) == Write(0)


def test_a_standby_waits_for_a_whole_period_of_silence() -> None:
    lease = fit()
    now = 0.0
    assert lease.handle(Looked(other(5)), now) is None
    while now < 1.5:
        now += 0.3
        assert lease.handle(Tick(), now) == Look()
        assert lease.handle(Looked(other(5)), now) is None
    assert lease.handle(Tick(), 1.8) == Look()
    assert lease.handle(Looked(other(6)), 1.8) is None, "it was renewed: silence begins anew"
    now = 1.8
    while now < 4.6:
        now += 0.3
        assert lease.handle(Tick(), now) == Look()
        assert lease.handle(Looked(other(6)), now) is None
    assert lease.handle(Tick(), 4.9) == Write(6)
    assert lease.handle(LeaseLost(), 4.95) == Look(), "somebody was first"
    assert lease.handle(Looked(other(7, "c")), 5.0) is None
    assert not lease.leading


def test_what_was_given_back_is_taken_at_once() -> None:
    assert fit().handle(Looked(other(5, "")), 0.0) == Write(5)


def test_a_predecessor_in_the_same_folder_is_dead() -> None:
    assert fit(lock="lock-b").handle(Looked(other(5)), 0.0) == Write(5)


def test_time_without_the_bus_does_not_count() -> None:
    lease = fit()
    lease.handle(Looked(other(5)), 0.0)
    assert lease.handle(Tick(), 0.3) == Look()
    assert lease.handle(Away(), 5.0) is None
    assert lease.handle(Tick(), 5.3) == Look()
    # The server is back, the key ran out while it was away, its holder lives.
    assert lease.handle(Looked(None), 5.4) is None
    assert lease.handle(Tick(), 5.7) == Look()
    assert lease.handle(Looked(None), 8.3) is None, "a gap: it stood still itself"
    for tenth in range(87, 113, 4):
        assert lease.handle(Tick(), tenth / 10) == Look()
        assert lease.handle(Looked(None), tenth / 10) is None
    assert lease.handle(Tick(), 11.5) == Write(0)


def test_a_leader_renews_and_trusts_its_lease_from_when_it_asked() -> None:
    lease = leading()
    assert lease.deadline == 1.0
    assert lease.handle(Tick(), 1.0) == Write(1)
    assert lease.handle(Tick(), 1.5) is None, "one request at a time"
    lease.handle(Written(2, 1.0), 2.0)
    assert not lease.lapsed(3.9)
    assert lease.lapsed(4.0)


def test_a_leader_without_an_answer_lapses_and_finds_out_what_became_of_its_write() -> None:
    lease = leading()
    assert lease.handle(Tick(), 1.0) == Write(1)
    assert lease.handle(Away(), 2.0) is None
    assert lease.handle(Tick(), 2.3) == Look()
    assert lease.handle(Away(), 3.3) is None
    assert lease.lapsed(3.3)
    assert lease.handle(Tick(), 3.6) == Look()
    assert lease.handle(Looked(LeaseKey("a", "boot-a", "lock-a", 2)), 3.7) == Write(2)
    lease.handle(Written(3, 3.7), 3.8)
    assert not lease.lapsed(3.8)


def test_a_leader_that_finds_another_stands_by() -> None:
    lease = leading()
    assert lease.handle(Tick(), 9.0) == Write(1), "it stood still for a while"
    assert lease.handle(LeaseLost(), 9.1) == Look()
    assert lease.handle(Looked(other(7)), 9.2) is None
    assert not lease.leading
    assert lease.holder == "b"


def test_a_leader_that_is_not_fit_any_more_gives_it_back() -> None:
    lease = leading()
    assert lease.handle(Fitness("stopping"), 0.5) == Write(1, give_back=True)
    assert not lease.leading
    lease.handle(Written(2, 0.5), 0.6)
    assert lease.holder == ""
    assert lease.handle(Tick(), 0.9) == Look()
    assert lease.handle(Looked(LeaseKey("", "boot-a", "lock-a", 2)), 1.0) is None


def test_a_lease_won_when_no_longer_fit_is_given_back() -> None:
    lease = fit()
    assert lease.handle(Looked(None), 0.0) == Write(0)
    assert lease.handle(Fitness("digest"), 0.1) is None
    assert lease.handle(Written(1, 0.0), 0.2) == Write(1, give_back=True)


@dataclass
class Key:
    """The bucket: one key with compare-and-set."""

    revision: int = 0
    held: LeaseKey | None = None


@dataclass
class Process:
    """One process, its clock's state, and an answer under way."""

    lease: Lease
    key: Key
    stuck_until: float = 0.0
    cut_until: float = 0.0
    led: list[float] = field(default_factory=list)

    def step(self, now: float) -> None:
        """Ask what is due; the hub answers at once, or not at all while this one is cut off."""
        if now < self.stuck_until:
            return
        request = self.lease.handle(Tick(), now)
        while request is not None:
            request = self.lease.handle(self._answer(request, now), now)
        if not self.lease.lapsed(now):
            self.led.append(now)

    def _answer(self, request: Request, now: float) -> Looked | Written | LeaseLost | Away:
        key = self.key
        if now < self.cut_until:
            return Away()
        if isinstance(request, Look):
            return Looked(key.held)
        if request.revision != (key.held.revision if key.held else 0):
            return LeaseLost()
        key.revision += 1
        name = "" if request.give_back else self.lease.me
        key.held = LeaseKey(name, self.lease.boot, self.lease.lock, key.revision)
        return Written(key.revision, now)


FAULTS = st.lists(
    st.tuples(
        st.integers(0, 300),  # tenths of a second
        st.integers(0, 2),
        st.sampled_from(["stuck", "cut", "unfit", "fit"]),
        st.floats(0.1, 9.0),
    ),
    max_size=12,
)


@examples(40)
@given(FAULTS)
def test_never_two_at_a_time_and_never_nobody_for_long(
    faults: list[tuple[int, int, str, float]],
) -> None:
    key = Key()
    processes = [Process(fit(name), key) for name in "abc"]
    for p in processes:
        p.lease.handle(Looked(None), 0.0)
        p.lease.asked = None  # its write never arrived
    for tenth in range(1, 500):
        now = tenth / 10
        for at, who, kind, seconds in faults:
            p = processes[who]
            if at != tenth:
                continue
            if kind == "stuck":
                p.stuck_until = now + seconds
            elif kind == "cut":
                p.cut_until = now + seconds
            else:
                request = p.lease.handle(Fitness("" if kind == "fit" else "why"), now)
                while request is not None:
                    request = p.lease.handle(p._answer(request, now), now)
        if tenth == 400:
            for p in processes:
                p.lease.handle(Fitness(""), now)
                p.lease.asked = None
        for p in processes:
            p.step(now)
        assert sum(not p.lease.lapsed(now) for p in processes if now >= p.stuck_until) <= 1
    # Faults end at 39 s, all are fit from 40 s on: one period of silence, and one look.
    assert any(p.led and p.led[-1] > 49.0 for p in processes)
