"""Going back to a checkpoint: the command says that it was done, or why not."""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_cli.__main__ import main
from diloco_cli.commands import checkpoints
from diloco_cli.commands.checkpoints import _versions
from diloco_cli.words import INVALID, CliError
from diloco_client import ApiError, Unreachable

Row = dict[str, Any]


class Client:
    """One run, as each look finds it, and its events; the last ones stay."""

    def __init__(self, *looks: Row, events: list[list[Row]] | None = None) -> None:
        self.looks, self.told = list(looks), events or [[]]

    def run(self, name: str) -> Row:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def show_checkpoint(self, run: str, number: int) -> Row:
        return {"number": number}

    def events(self, run: str) -> list[Row]:
        return self.told.pop(0) if len(self.told) > 1 else self.told[0]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LOOK_S", 0.0)


def at(restores: int, state: str = "running", shards: int = 1) -> Row:
    spec = {"algorithm": {"shards": shards}}
    return {"name": "r", "spec": spec, "state": state, "status": {"restores": restores}}


def event(kind: str, serial: int | None, shard: int = 0, seq: int = 9) -> Row:
    data = {} if serial is None else {"serial": serial, "shard": shard}
    return {"kind": kind, "text": f"{kind} of {serial}", "data": data, "seq": seq}


def restored(client: Client, serial: int = 3, wait: bool = True) -> Row:
    go_back = checkpoints._restored
    return go_back(client, "r", serial, since=8, wait=wait)  # type: ignore[arg-type]


FAILED, DONE = event("restore-failed", 3), event("restored", 3)
BEFORE = [event("restore-failed", 1), event("restored", 2)]


@pytest.mark.parametrize(
    "told",
    [
        [[*BEFORE, FAILED]],
        [BEFORE, [*BEFORE, FAILED]],  # the status was quicker than the event
        [[DONE, FAILED, event("restored", 4)]],
    ],
)
def test_a_restore_that_failed_is_said_to(
    told: list[list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, 1.0)
    with pytest.raises(CliError, match="restore-failed of 3"):
        restored(Client(at(2), at(3), events=told))


@pytest.mark.parametrize(
    "told",
    [
        [[FAILED, event("restored", 3, shard=1)]],
        [[DONE], [DONE, event("restore-failed", 3, shard=1)]],  # the other tells a moment later
    ],
)
def test_a_restore_that_failed_in_one_shard_is_said_to(
    told: list[list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, 1.0)
    with pytest.raises(CliError, match="restore-failed of 3"):
        restored(Client(at(2), at(3, shards=2), events=told))


@pytest.mark.parametrize(
    ("shards", "told", "whose"),
    [
        (1, BEFORE, "run 'r' is done"),
        (2, [*BEFORE, DONE], "syncer shard 1 of run 'r' is done"),
        (2, [], "syncer shard 0, 1 of run 'r' is done"),
    ],
)
def test_a_restore_of_which_nothing_tells_is_not_said_to_be_done(
    shards: int, told: list[Row], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader dies between its status and its event, and whoever leads next tells nothing."""
    monkeypatch.setattr(checkpoints, "EVENT_S", 0.0)
    with pytest.raises(CliError, match=f"^{whose} with the wish, and nothing tells"):
        restored(Client(at(2), at(3, shards=shards), events=[told]))


def test_every_shard_is_waited_for() -> None:
    both = [DONE, event("restored", 3, shard=1)]
    assert restored(Client(at(2), at(3, shards=2), events=[[DONE], both])) == at(3, shards=2)


def test_a_shard_that_failed_first_may_go_back_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its leader died once it had told so, and the next one goes back."""
    clock = Clock(monkeypatch, 1.0)
    early = [DONE, event("restore-failed", 3, shard=1)]
    told = [early, early, [*early, event("restored", 3, shard=1)]]
    assert restored(Client(at(3, shards=2), events=told)) == at(3, shards=2)
    assert clock.now == 2.0


@pytest.mark.parametrize("told", [[*BEFORE, DONE], [FAILED, DONE], [DONE, *BEFORE[:1]]])
def test_a_restore_that_was_done_is_said_to(told: list[Row]) -> None:
    assert restored(Client(at(2), at(3), events=[told])) == at(3)


@pytest.mark.parametrize(("kind", "fails"), [("restored", False), ("restore-failed", True)])
def test_a_syncer_that_tells_no_serial_is_believed(
    monkeypatch: pytest.MonkeyPatch, kind: str, fails: bool
) -> None:
    monkeypatch.setattr(checkpoints, "EVENT_S", 0.0)
    client = Client(at(3), events=[[event(kind, None)]])
    if fails:
        with pytest.raises(CliError):
            restored(client)
    else:
        assert restored(client) == at(3)


@pytest.mark.parametrize("kind", ["restored", "restore-failed"])
def test_what_came_before_the_wish_says_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A syncer of an older release told it, and has been upgraded since."""
    monkeypatch.setattr(checkpoints, "EVENT_S", 0.0)
    with pytest.raises(CliError, match="nothing tells whether it went back"):
        restored(Client(at(3), events=[[event(kind, None, seq=8)]]))


def test_what_came_before_a_wish_is_looked_for_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Asked(Client):
        def restore(self, run: str, number: int, as_run: str = "") -> Row:
            self.told = [[event("restored", None, seq=8)]]
            return {"run": "r", "serial": 3}

    monkeypatch.setattr(checkpoints, "EVENT_S", 0.0)
    clients = iter([Asked(at(3), events=[[event("began", None, seq=n)]]) for n in (8, 7)])
    monkeypatch.setattr(checkpoints, "connect", lambda _: nullcontext(next(clients)))
    monkeypatch.setattr(sys, "argv", ["diloco", "checkpoint", "restore", "r", "1", "--json"])
    for known in (False, True):
        with pytest.raises(SystemExit) as ended:
            main()
        assert (not ended.value.code) is known
    assert "nothing tells whether it went back" in capsys.readouterr().err


def test_a_wish_that_another_one_replaced_is_not_said_to_be_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoints, "EVENT_S", 0.0)
    with pytest.raises(CliError, match="another restore"):
        restored(Client(at(4), events=[[event("restored", 4)]]))


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_a_run_that_ends_first_has_not_gone_back(state: str) -> None:
    with pytest.raises(CliError, match="was over before"):
        restored(Client(at(2), at(2, state)))


class Clock:
    """Ten minutes pass between two looks, or as many seconds as are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look_s: float = 600.0) -> None:
        self.now = 0.0
        monkeypatch.setattr(checkpoints, "LOOK_S", look_s)
        monkeypatch.setattr(
            checkpoints, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        )

    def sleep(self, seconds: float) -> None:
        assert self.now < 36_000, "it waits for ever"
        self.now += seconds


WISHED = "starved: restoring r.ab12/000001"


def saying(reason: str, state: str = "starved", codes: tuple[str, ...] = ()) -> Row:
    status = {"restores": 0, "reason": reason}
    return {"state": state, "status": status, "reason_codes": codes}


@pytest.mark.parametrize(
    "reason",
    [WISHED, f"shard 1: {WISHED}", "as the user asked; restoring r.ab12/000001; no snapshot: full"],
)
def test_a_run_that_says_it_goes_back_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """A checkpoint of many GB takes an hour and more."""
    clock = Clock(monkeypatch)
    looks = [saying(reason)] * 9
    assert restored(Client(*looks, at(3), events=[[DONE]])) == at(3)
    assert clock.now == 9 * 600


@pytest.mark.parametrize(
    "look",
    [
        saying("all is well", "running"),
        saying(f"{WISHED}: no space is left"),  # of another shard that went back
        saying(WISHED, "leaderless"),
        saying(WISHED, codes=("starved", "hub-away")),
        {"state": "queued", "status": None, "reason_codes": ()},
    ],
)
def test_a_run_of_which_nothing_says_so_may_still_go_back(
    monkeypatch: pytest.MonkeyPatch, look: Row
) -> None:
    clock = Clock(monkeypatch)
    with pytest.raises(CliError, match=r"for 1200 s nothing said .* It may still go back") as told:
        restored(Client(look))
    assert clock.now == 1200
    assert "'diloco stop r' ends it before it does" in str(told.value)
    assert restored(Client(look), wait=False) == look


def making(state: str = "running") -> Row:
    status = {"checkpoint": 2, "checkpoint_state": "making"}
    return {"state": state, "status": status, "reason_codes": ()}


def test_a_checkpoint_is_waited_for_while_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    made = making() | {"status": {"checkpoint": 2, "checkpoint_state": "complete"}}
    client = Client(*[making()] * 9, made)
    assert checkpoints._made(client, "r", 2) == {"number": 2}  # type: ignore[arg-type]
    assert clock.now == 9 * 600


def test_a_checkpoint_of_which_nothing_is_heard_may_still_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    client = Client(making(), making("leaderless"))
    with pytest.raises(CliError, match=r"for 1200 s nothing said .* It may still be made"):
        checkpoints._made(client, "r", 2)  # type: ignore[arg-type]
    assert clock.now == 1200


def test_a_damaged_one_is_listed_with_how_to_remove_it() -> None:
    line = checkpoints._damaged_line({"ref": "r.ab12/2", "reason": "r.ab12/2/x is damaged: y"})
    assert line == "r.ab12/2/x is damaged: y: 'diloco checkpoint delete r.ab12/2' removes it"


def test_what_is_left_of_a_tape_is_listed_with_how_to_remove_it() -> None:
    line = checkpoints._tape_line({"ref": "r.ab12/tape", "run": "r"})
    assert line.startswith("r.ab12/tape: the archived tape of a deleted run: ")
    assert "'diloco checkpoint delete r.ab12' removes it, and all checkpoints" in line


@pytest.mark.parametrize(
    ("given", "asked", "said"),
    [
        (("r", "3"), ("checkpoint", "r", 3), "checkpoint 3 is removed\n"),
        (("r.ab12/3",), ("stored", "r.ab12/3"), "checkpoint r.ab12/3 is removed\n"),
        (("r.ab12",), ("folder", "r.ab12"), "r.ab12: all is removed\n"),
        (("r",), None, ""),
        (("r.ab12", "3"), None, ""),
        (("r.ab12/3", "3"), None, ""),
    ],
)
def test_what_is_deleted_is_what_was_named(
    given: tuple[str, ...],
    asked: tuple[Any, ...] | None,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A whole folder only where nothing else can be meant."""
    told: list[tuple[Any, ...]] = []

    class Deleting:
        def __getattr__(self, name: str) -> Any:
            return lambda *of: told.append((name.removeprefix("delete_"), *of))

    monkeypatch.setattr(checkpoints, "connect", lambda _: nullcontext(Deleting()))
    monkeypatch.setattr(sys, "argv", ["diloco", "checkpoint", "delete", *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code or 0) == (0 if asked else INVALID)
    assert told == ([asked] if asked else [])
    out, err = capsys.readouterr()
    assert out == said and ("or the FOLDER of a deleted run" in err) is (asked is None)
    if asked is not None:
        monkeypatch.setattr(sys, "argv", [*sys.argv, "--json"])
        with pytest.raises(SystemExit):
            main()
        named = {"run": "r", "number": 3} if asked[0] == "checkpoint" else {"ref": given[0]}
        assert json.loads(capsys.readouterr().out) == {**named, "removed": True}


def test_a_cluster_that_does_not_answer_for_a_moment_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restart of the coordinator, or of the message server, ends nothing."""
    trouble: list[Exception] = [Unreachable("nobody"), ApiError(503, "away", "try again")]

    class Moody(Client):
        def run(self, name: str) -> Row:
            if len(self.looks) == 1 and trouble:
                raise trouble.pop()
            return super().run(name)

    assert restored(Moody(at(2), at(3), events=[[DONE]])) == at(3)
    assert not trouble
    trouble.append(ApiError(401, "no", "who are you"))
    with pytest.raises(ApiError):
        restored(Moody(at(2), at(3), events=[[DONE]]))
    monkeypatch.setattr(checkpoints, "PATIENCE_S", -1.0)
    trouble[:] = [Unreachable("nobody")]
    with pytest.raises(Unreachable):
        restored(Moody(at(2), at(3), events=[[DONE]]))


def test_fragments_of_two_versions_are_not_said_to_be_at_one() -> None:
    assert _versions([3, 3]) == "all fragments at version 3"
    assert _versions([4, 3, 4]) == "fragments at versions 3 to 4"
