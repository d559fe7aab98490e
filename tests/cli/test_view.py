"""The live view: a screen in a terminal, lines elsewhere."""

import io
import json
from typing import Any

import pytest
from full_disk import Full
from rich.console import Console

from diloco_cli import live, words
from diloco_cli.live import Screen
from diloco_cli.seen import ROUNDS_VIEWED, Seen
from diloco_cli.view import event_lines, learners_table, lines, screen, speed_lines, speeds_line
from diloco_cli.words import CliError, plain
from diloco_client import ApiError, Cursor, Told, Unreachable

Row = dict[str, Any]


def seen_of(run: Row, rounds: list[Row], events: list[Row]) -> Seen:
    return Seen("demo", run, rounds, events)


def printed(what: Any, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(what)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_the_screen_shows_every_learner_with_its_state(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    text = printed(screen(seen_of(run, rounds, events), ["12:00:00 b ended"]))
    table = {line.split()[0]: line for line in text.splitlines() if line[:2] in ("a ", "b ", "c ")}
    assert table["c"].split()[1] == "down"
    assert "recovered b" in text
    assert table["a"].split()[1:5] == ["stepping", "0", "100", "1.600"]
    assert "goodput: 73.3 % of the learners' time went into useful tokens" in text
    assert "12:00:00 b ended" in text


def test_before_there_is_a_status_there_is_no_table(run: Row) -> None:
    run |= {"status": None, "state": "queued", "reason": "queued: no free syncer"}
    assert lines(seen_of(run, [], [])) == ["run demo: queued: no free syncer"]
    assert "learner" not in printed(screen(seen_of(run, [], [])))
    assert printed(screen(None)).strip() == ""


def test_before_the_first_round_everything_is_shown_that_there_is(run: Row) -> None:
    run["status"] |= {"versions": [-1, -1], "tokens_processed": 0, "tokens_useful": 0}
    text = "\n".join(lines(seen_of(run, [], [])))
    assert "they have no version yet" in text
    assert "goodput" not in text


def test_the_newest_events_stand_below_the_table_each_with_whom_it_is_about(
    events: list[Row],
) -> None:
    told = event_lines(events)
    assert len(told) == 4 and told[-1].endswith("leave a")
    assert not any("evaluation" in line for line in told)
    other = events[-1] | {"data": {"learner": "b"}, "text": "it stepped"}
    assert event_lines([other])[0].endswith("b: it stepped")


def test_every_figure_is_readable_in_80_columns(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    """Whatever has happened: a long text must not squeeze the figures."""
    learners = run["status"]["learners"]
    learners["a"] |= {"step": 123456, "loss": 11.25, "tokens_per_s": 1234567.0, "wait_s": 12.5}
    learners["a"] |= {"merged_round": 12345, "incarnation": 12, "state": "recovering"}
    events[-1]["text"] = "x" * 300
    table = printed(learners_table(run), width=80)
    for figure in ("recovering", "123456", "11.250", "1234567", "12.500", "round 12345"):
        assert figure in table
    assert "…" not in table


HOPPER: Row = {
    "platform": "gpu",
    "device": "NVIDIA H100 80GB HBM3",
    "devices": 8,
    "tokens_per_s": 123_456.0,
    "data_wait_ratio": 0.0123,
    "mfu": 0.4125,
    "flops_estimated": False,
    "memory_of": "device",
    "memory_bytes": 61_200_000_000,
    "memory_peak_bytes": 72_500_000_000,
    "memory_limit_bytes": 80_000_000_000,
}
UNKNOWN: Row = HOPPER | {
    "device": "cpu",
    "devices": 1,
    "tokens_per_s": None,
    "data_wait_ratio": None,
    "mfu": None,
    "memory_of": "process",
    "memory_bytes": 512_000_000,
    "memory_limit_bytes": None,
}


def test_a_wide_terminal_shows_how_well_devices_are_used_and_no_made_up_number(run: Row) -> None:
    run["speeds"] = {"a": HOPPER, "b": UNKNOWN}
    rows = {}
    for width in (80, 120, 200):
        text = printed(learners_table(run), width=width)
        assert "…" not in text and max(map(len, text.splitlines())) <= width
        rows[width] = {line.split()[0]: line for line in text.splitlines()}
    assert "MFU" not in rows[80]["learner"]
    # Its own word is of its newest steps; the syncer's is a mean.
    assert "123456" in rows[80]["a"] and "1000" in rows[80]["b"]
    assert rows[120]["a"].split()[-6:] == ["41.2", "%", "1.2", "%", "61.2", "GB"]
    assert rows[120]["b"].split()[-4:] == ["-", "-", "512", "MB"]
    assert rows[200]["a"].endswith("8 x NVIDIA H100 80GB HBM3")
    assert rows[200]["c"].split()[-4:] == ["-", "-", "-", "-"], "it said nothing"


def test_two_lines_tell_how_fast_one_learner_trains() -> None:
    assert speed_lines(HOPPER | {"memory_limit_bytes": 640_000_000_000}) == [
        "8 x NVIDIA H100 80GB HBM3: it trains 123,456 tokens/s, it waits 1.2 % of the time for "
        "data, it reaches 41.2 % of the devices' peak (MFU)",
        "device memory: 61.2 GB of 640 GB are in use, and at most 72.5 GB were",
    ]
    late = {"host 1 (node1)": 0.0021, "host 2 (node2)": 0.31}
    assert speed_lines(HOPPER | {"hosts": late})[2:] == [
        "hosts that begin a step late: host 2 (node2) by 0.310 s, host 1 (node1) by 0.002 s"
    ]
    assert speed_lines(UNKNOWN) == [
        "1 x cpu: its speed is not known yet",
        "process memory: 512 MB are in use, and at most 72.5 GB were",
    ]


def test_a_line_tells_what_all_learners_do_and_who_is_worst(run: Row) -> None:
    about = HOPPER | {"mfu": 0.25, "flops_estimated": True, "data_wait_ratio": 0.2}
    assert speeds_line({"a": HOPPER, "b": about}) == (
        "speed: 2 learners train 246,912 tokens/s; b waits most for data, 20.0 % of its time; "
        "a holds most memory, 61.2 GB; b uses its devices least, ~25.0 % of their peak (MFU)"
    )
    assert speeds_line({"b": UNKNOWN}).endswith("devices' peak they reach (MFU) is not known")
    run["speeds"] = {"a": HOPPER}
    assert any(
        line.startswith("speed: 1 learner trains 123,456 tokens/s")
        for line in lines(seen_of(run, [], []))
    )


def test_without_a_terminal_messages_come_once_and_lines_at_every_change(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    file = io.StringIO()
    with Screen(Console(file=file, force_terminal=False)) as view:
        seen = seen_of(run, rounds, events)
        view.show(None, ["it is up"], 1)
        view.show(seen, ["it is up", "b [ended]"], 2)
        view.show(seen, ["it is up", "b [ended]"], 2)
        seen.run = run | {"state": "stopped"}
        view.show(seen, ["b [ended]", "again"], 3)
    shown = file.getvalue()
    assert shown.count("it is up\n") == 1
    assert shown.count("b [ended]") == 1
    assert shown.count("again") == 1
    assert shown.count("run demo: finished") == 1
    assert shown.count("run demo: stopped") == 1


def test_lines_that_find_no_room_are_not_kept_in_memory() -> None:
    """I12."""
    file = Full()
    with Screen(Console(file=file, force_terminal=False)) as view:
        with pytest.raises(OSError, match="No space"):
            view.show(None, ["it is lost"], 1)
        file.full = False
        view.show(None, ["it is said"], 2)
    assert file.getvalue() == "it is said\n"


def test_every_class_of_tokens_is_shown(run: Row, rounds: list[Row], events: list[Row]) -> None:
    tokens = {"merged": 1200, "refused": 0, "overwritten": 7, "lost": 30, "in_flight": 5}
    run["status"] |= {"tokens": tokens, "tokens_reread": 20}
    text = "\n".join(lines(seen_of(run, rounds, events)))
    assert (
        "  of them: merged 1,200, refused 0, overwritten 7, lost 30, in flight 5; 20 are read again"
    ) in text


def test_of_one_evaluation_nothing_is_told_twice(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    told = next(e for e in events if e["kind"] == "evaluation")
    others = [e for e in events if e["kind"] != "evaluation"]
    (line,) = (x for x in lines(seen_of(run, rounds, [*others, told])) if "validation loss" in x)
    assert line.endswith(f" after {told['data']['steps']} steps")
    later = told | {"data": told["data"] | {"steps": 960, "val_loss": 0.5}}
    (line,) = (x for x in lines(seen_of(run, rounds, [told, later])) if "validation loss" in x)
    assert line.startswith("validation loss: it is 0.5000 after 960 steps, and was ")


def test_a_view_keeps_the_newest_round_and_nothing_twice(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    """It is up as long as the cluster: rounds are several kB each."""

    class Cluster:
        shown = 2

        def run(self, name: str) -> Row:
            return run

        def rounds(self, name: str, after: int = 0, newest: int = 0) -> list[Row]:
            return [r for r in rounds[: self.shown] if r["seq"] > (after or -1)]

        def events_since(self, name: str, cursor: Cursor) -> Told:
            newest = max(e["seq"] for e in events)
            return Told([e for e in events if e["seq"] > (cursor[0] or -1)], (newest, ""), False)

    client: Any = Cluster()
    view, whole = Seen("demo", rounds_max=ROUNDS_VIEWED), Seen("demo")
    for client.shown in (2, 3, 5):
        view.look(client)
        whole.look(client)
    assert view.rounds == rounds[-1:] and whole.rounds == rounds
    assert view.events == whole.events == events
    assert lines(view) == lines(whole)
    # The hub was put back from a backup, and counts its events anew.
    client.events_since = lambda name, cursor: Told(events[:2], (0, ""), again=True)
    whole.look(client)
    assert whole.events == events[:2]


def test_a_coordinator_that_does_not_answer_is_told_of(
    run: Row, rounds: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is shown meanwhile is old."""
    now = 0.0

    class Away:
        def run(self, name: str) -> Row:
            if 1.0 <= now < 3.0:
                raise Unreachable("nobody listens")
            if 3.0 <= now < 5.0:  # the message server is being restarted
                raise ApiError(503, "The message server does not answer", "try again")
            return run | {"state": "running" if now < 5.0 else "finished"}

        def rounds(self, name: str, after: int = 0, newest: int = 0) -> list[Row]:
            return []

        def events_since(self, name: str, cursor: Cursor) -> Told:
            return Told([], cursor, again=False)

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(live.time, "sleep", passes)
    monkeypatch.setattr(live.time, "monotonic", lambda: now)
    client: Any = Away()
    live.follow(client, "demo", as_json=False)
    out = capsys.readouterr().out
    assert out.count("the coordinator has not answered for 2 s: this is what it said last") == 1
    assert "run demo: running" in out and "run demo: finished" in out


def test_rounds_that_cannot_be_read_are_told_of_and_the_rest_is_shown(
    run: Row, rounds: list[Row], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator is there, and its message server is not, for longer than one looks on."""
    now = 0.0

    class CutOff:
        def run(self, name: str) -> Row:
            return run | {"state": "running" if now < 99.0 else "finished"}

        def rounds(self, name: str, after: int = 0, newest: int = 0) -> list[Row]:
            if now < 60.0:
                raise ApiError(503, "The message server does not answer", "try again")
            return [r for r in rounds if r["seq"] > (after or -1)]

        def events_since(self, name: str, cursor: Cursor) -> Told:
            return Told([], cursor, again=False)

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(live.time, "sleep", passes)
    monkeypatch.setattr(live.time, "monotonic", lambda: now)
    client: Any = CutOff()
    live.follow(client, "demo", as_json=False)
    out = capsys.readouterr().out
    why = "the rounds cannot be read now: The message server does not answer: try again\n"
    assert out.count(why) == 6 and out.count("run demo: running") == 10
    assert "has not answered for" not in out
    assert "round 4 was committed" in out.rpartition("cannot be read")[2]


def test_json_lines_tell_of_changes_alone(
    run: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = iter(["running"] * 3 + ["paused"] * 2 + ["finished"])

    class Cluster:
        def run(self, name: str) -> Row:
            return run | {"state": next(states)}

        def rounds(self, name: str, after: int = 0, newest: int = 0) -> list[Row]:
            return []

        def events_since(self, name: str, cursor: Cursor) -> Told:
            return Told([], cursor, again=False)

    monkeypatch.setattr(live.time, "sleep", lambda _: None)
    client: Any = Cluster()
    live.follow(client, "demo", as_json=True)
    told = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert told == ["running", "paused", "finished"]


@pytest.mark.parametrize("state", ["running", "finished"])
def test_another_run_of_that_name_is_not_the_one_that_is_watched(
    run: Row, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script goes by the exit status, and waits for the run that it knows."""
    looks = iter([Unreachable("not yet"), (1.0, "running"), (1.0, "running"), (2.0, state)])

    class Cluster:
        def run(self, name: str) -> Row:
            look = next(looks)
            if isinstance(look, Unreachable):
                raise look
            return run | {"created_at": look[0], "state": look[1]}

        def rounds(self, name: str, after: int = 0, newest: int = 0) -> list[Row]:
            return []

        def events_since(self, name: str, cursor: Cursor) -> Told:
            return Told([], cursor, again=False)

    monkeypatch.setattr(live.time, "sleep", lambda _: None)
    client: Any = Cluster()
    with pytest.raises(CliError, match="it was deleted, and another run has its name") as ended:
        live.follow(client, "demo", as_json=True)
    assert ended.value.status == words.UNKNOWN


def test_a_run_that_was_submitted_anew_begins_anew(run: Row, rounds: list[Row]) -> None:
    """Its rounds and events have the numbers of those of the deleted one."""

    class Cluster:
        created_at = 1.0

        def run(self, name: str) -> Row:
            return run | {"created_at": self.created_at}

        def rounds(self, name: str, after: int = 0, newest: int = 0) -> list[Row]:
            return [r for r in rounds[: 5 if self.created_at == 1.0 else 2] if r["seq"] > after]

        def events_since(self, name: str, cursor: Cursor) -> Told:
            return Told([], cursor, again=False)

    client: Any = Cluster()
    view = Seen("demo")
    view.look(client)
    assert len(view.rounds) == 5
    client.created_at = 2.0
    view.look(client)
    assert view.rounds == rounds[:2]


@pytest.mark.parametrize("back", ["fewer committed", "another epoch", "not begun", "events"])
def test_rounds_of_a_run_that_went_back_are_read_anew(
    run: Row, rounds: list[Row], events: list[Row], back: str
) -> None:
    """The hub was put back. Other rounds have the numbers of those that were read."""
    status, events = run["status"], [e | {"seq": n} for n, e in enumerate(events, 1)]
    now: dict[str, Row | None] = {
        "fewer committed": status | {"rounds_committed": status["rounds_committed"] - 1},
        "another epoch": status | {"epoch": status.get("epoch", 0) + 1},
        "not begun": None,
        "events": status,
    }

    class Cluster:
        put_back = False

        def run(self, name: str) -> Row:
            return run | {"status": now[back]} if self.put_back else run

        def rounds(self, name: str, after: int = 0, newest: int = 0) -> list[Row]:
            there = [r | {"round": 9000} for r in rounds[:2]] if self.put_back else rounds
            return [r for r in there if r["seq"] > (after or -1)]

        def events_since(self, name: str, cursor: Cursor) -> Told:
            if back == "events" and self.put_back:
                return Told(events[:2] if cursor[0] != 2 else [], (2, ""), again=cursor[0] != 2)
            return Told([e for e in events if e["seq"] > cursor[0]], (len(events), ""), again=False)

    told = Cluster()
    client: Any = told
    view = Seen("demo")
    view.look(client)
    assert view.rounds == rounds and view.events == events
    told.put_back = True
    for _ in range(2):
        view.look(client)
        assert [r["round"] for r in view.rounds] == ([] if back == "not begun" else [9000] * 2)
        assert view.events == (events[:2] if back == "events" else events)


@pytest.mark.parametrize(("forced", "dumb"), [(True, False), (False, True)])
def test_there_is_no_screen_where_nobody_could_see_one(forced: bool, dumb: bool) -> None:
    """Colours that are forced upon a file, and a terminal without a cursor."""
    console = Console(file=io.StringIO(), force_terminal=forced)
    if dumb:
        console = Console(file=Tty(), force_terminal=True, _environ={"TERM": "dumb"})
    assert live.Screen(console)._live is None
    assert live.Screen(Console(file=Tty(), _environ={"TERM": "xterm"}))._live is not None


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_before_anybody_leads_no_leader_is_made_up(run: Row) -> None:
    told = syncers_told(run, "", "catching up")
    assert told == "syncers: nobody leads yet; s1 is catching up"


@pytest.mark.parametrize(
    ("named", "states", "told"),
    [
        ("", ("leading", "standby"), "s1 takes over; s2 stands by"),
        ("", ("leading",), "s1 takes over; nobody stands by"),
        (
            "s1",
            ("gone", "leading"),
            "s1 led in term 3, and is gone; s2 takes over; nobody stands by",
        ),
        ("s1", ("gone", "standby"), "s1 led in term 3, and is gone; s2 stands by"),
        ("s1", ("leading",), "s1 leads in term 3; nobody stands by"),
        ("s1", ("leading", "ineligible"), "s1 leads in term 3; s2 is ineligible"),
    ],
)
def test_who_leads_is_told_before_its_first_status_and_after_its_last(
    run: Row, named: str, states: tuple[str, ...], told: str
) -> None:
    """What each syncer does is told by itself, and the status by whoever led when it was told."""
    assert syncers_told(run, named, *states) == f"syncers: {told}"


def test_the_leader_of_another_shard_takes_nothing_over(run: Row) -> None:
    told = syncers_told(run, "s1", "leading", "leading", shards=2)
    assert told == "syncers: s1 leads in term 3; s2 leads shard 1; nobody stands by"


def syncers_told(run: Row, named: str, *states: str, shards: int = 1) -> str:
    """The line about syncers s1, s2 ... in these states; the status names the leader."""
    run["status"] |= {"leader": named, "term": 3}
    run["syncers"] = [
        {"id": f"s{n + 1}", "state": state, "reason": "", "lag_records": 0, "shard": n % shards}
        for n, state in enumerate(states)
    ]
    return next(line for line in lines(seen_of(run, [], [])) if line.startswith("syncers:"))


def test_no_text_of_a_site_gives_a_terminal_orders() -> None:
    """Names and texts come as they were sent, by whoever may write an event."""
    sent = "\x1b]0;owned\x07 \x1b[2J\r \x9b31m \u202eevil\u2066 täm\tx\ny"
    shown = plain(sent)
    assert shown == ("\\x1b]0;owned\\x07 \\x1b[2J\\r \\x9b31m \\u202eevil\\u2066 täm\tx\ny")
    assert "\x1b" not in printed(screen(None, [sent]))


def test_no_text_of_a_site_gives_a_table_orders(run: Row) -> None:
    """What names a device is free text. rich takes brackets for its own orders, and fails at an
    end without a beginning."""
    sent = "[/x] [red]H100[/red] \x1b]0;owned\x07\nrome  stepping"
    run["speeds"] = {"a": HOPPER | {"device": sent}}
    run["status"]["learners"]["a"]["state"] = "[bold]odd[/] \x1b[2J"
    run["status"]["learners"]["[/evil]"] = dict(run["status"]["learners"]["b"])
    table = printed(learners_table(run), width=250).splitlines()
    (of_a,) = [line for line in table if line.startswith("a ")]
    assert of_a.endswith("8 x [/x] [red]H100[/red] \\x1b]0;owned\\x07 rome stepping")
    assert "[bold]odd[/] \\x1b[2J" in of_a
    assert any(line.startswith("[/evil]") for line in table)
