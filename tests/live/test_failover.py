"""A standby takes over from a leader that dies or stands still; nothing is lost or done twice."""

import signal

import pytest
from live.stack import SELDOM, Stack, spec
from live.tape_checks import check_tape

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture
def stack(shared: Stack) -> Stack:
    """A leader and a standby, both of which have followed the first rounds."""
    shared.client.create_run(spec(keeping=SELDOM))
    shared.wait_until(lambda: len(shared.rounds()) > 12, "the first rounds")
    shared.wait_until(lambda: shared.leader() and shared.standby(), "a leader and a standby")
    return shared


def committed_in(stack: Stack, term: int) -> int:
    return sum(r["term"] == term for r in stack.committed())


def term_of(stack: Stack) -> int:
    return int(stack.status()["term"])


def test_a_standby_takes_over_from_a_killed_leader_and_the_next_from_it(stack: Stack) -> None:
    for _ in range(2):
        old, term = stack.leader(), term_of(stack)
        stack.send(signal.SIGKILL, old)
        # The standby, but on a very busy machine: there the old leader may be back before the
        # standby looks, and then it is as good as the other one.
        stack.wait_until(
            lambda term=term: committed_in(stack, term + 1) > 6, "rounds in the new term"
        )
        # Restarted by its supervisor, it executes the tape and stands by: it has compared every
        # digest with those of the other process (I9).
        stack.wait_until(lambda: stack.leader() and stack.standby(), "both to be back")
    assert not stack.told("standby-unfit")
    check_tape(stack.rounds())

    # Whoever looks from outside finds the same bytes.
    stack.end()
    verified = stack.diloco("tape", "verify", "r")
    assert (verified["faults"], verified["records"] > 20) == ([], True)
    replayed = stack.diloco("replay", "r")
    assert (replayed["fault"], replayed["records"] > 0) == (None, True)
    shown = stack.diloco("tape", "show", "r", "--from", "2")
    assert [r["seq"] for r in shown] == list(range(2, verified["records"] + 1))


@pytest.mark.long
def test_a_leader_that_stood_still_commits_nothing_more_and_stands_by(stack: Stack) -> None:
    old, new, term = stack.leader(), stack.standby(), term_of(stack)
    stack.send(signal.SIGSTOP, old)
    stack.wait_until(lambda: stack.leader() == new, f"{new} to lead")
    stack.wait_until(lambda: committed_in(stack, term + 1) > 6, "rounds in the new term")
    stack.send(signal.SIGCONT, old)
    stack.wait_until(lambda: stack.standby() == old, f"{old} to stand by")
    before = len(stack.rounds())
    stack.wait_until(lambda: len(stack.rounds()) > before + 6, "rounds after its return")
    assert any(e["source"] == old for e in stack.told("deposed"))
    assert (stack.leader(), term_of(stack)) == (new, term + 1), "nobody was misled"
    assert all(r["term"] == term + 1 for r in stack.rounds()[before:])
    check_tape(stack.rounds())


def test_no_standby_takes_over_because_the_message_server_was_away(stack: Stack) -> None:
    leader, term = stack.leader(), term_of(stack)
    before = len(stack.rounds())
    stack.client.chaos("kill", "nats")
    stack.wait_until(
        lambda: any(e["kind"] == "fault-applied" for e in stack.client.events()), "its death"
    )
    stack.wait_until(lambda: len(stack.rounds()) > before + 12, "rounds after its return")
    assert (stack.leader(), term_of(stack)) == (leader, term)
    check_tape(stack.rounds())
