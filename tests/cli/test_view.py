"""The live view: a screen in a terminal, lines elsewhere."""

import io
from typing import Any

from rich.console import Console

from diloco_cli.live import Screen
from diloco_cli.seen import ROUNDS_VIEWED, Seen
from diloco_cli.view import human_bytes, last_events, lines, screen

Row = dict[str, Any]


def seen_of(run: Row, rounds: list[Row], events: list[Row]) -> Seen:
    return Seen("demo", run, rounds, events)


def printed(what: Any) -> str:
    console = Console(file=io.StringIO(), width=160, force_terminal=False)
    console.print(what)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def test_the_screen_shows_every_learner_with_its_state(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    text = printed(screen(seen_of(run, rounds, events), ["12:00:00 b ended"]))
    table = {line.split()[0]: line for line in text.splitlines() if line[:2] in ("a ", "b ", "c ")}
    assert table["c"].split()[1] == "down"
    assert "recovered b" in table["b"]
    assert table["a"].split()[1:5] == ["stepping", "0", "100", "1.600"]
    assert "goodput 73.3 % of the learners' time" in text
    assert "12:00:00 b ended" in text


def test_before_there_is_a_status_there_is_no_table(run: Row) -> None:
    run |= {"status": None, "state": "queued", "reason": "queued: no free syncer"}
    assert lines(seen_of(run, [], [])) == ["run demo: queued: no free syncer"]
    assert "learner" not in printed(screen(seen_of(run, [], [])))
    assert printed(screen(None)).strip() == ""


def test_before_the_first_round_everything_is_shown_that_there_is(run: Row) -> None:
    run["status"] |= {"versions": [-1, -1], "tokens_processed": 0, "tokens_useful": 0}
    text = "\n".join(lines(seen_of(run, [], [])))
    assert "versions none" in text
    assert "goodput" not in text


def test_the_newest_event_about_a_learner_counts(events: list[Row]) -> None:
    newest = last_events(events)
    assert newest["b"] == "recovered b"
    assert newest["a"] == "leave a"


def test_without_a_terminal_messages_come_once_and_lines_at_every_change(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    file = io.StringIO()
    with Screen(Console(file=file, force_terminal=False)) as view:
        seen = seen_of(run, rounds, events)
        view.show(None, ["up"], 1)
        view.show(seen, ["up", "b [ended]"], 2)
        view.show(seen, ["up", "b [ended]"], 2)
        seen.run = run | {"state": "stopped"}
        view.show(seen, ["b [ended]", "again"], 3)
    shown = file.getvalue()
    assert shown.count("up\n") == 1
    assert shown.count("b [ended]") == 1
    assert shown.count("again") == 1
    assert shown.count("run demo: finished") == 1
    assert shown.count("run demo: stopped") == 1


def test_sizes_are_readable() -> None:
    assert [human_bytes(n) for n in (0, 999, 1500, 2_500_000, 3e9, 4e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "3.0 GB",
        "4.0 TB",
    ]


def test_every_class_of_tokens_is_shown(run: Row, rounds: list[Row], events: list[Row]) -> None:
    tokens = {"merged": 1200, "refused": 0, "overwritten": 7, "lost": 30, "in_flight": 5}
    run["status"] |= {"tokens": tokens, "tokens_reread": 20}
    text = "\n".join(lines(seen_of(run, rounds, events)))
    assert (
        "tokens: merged 1,200, refused 0, overwritten 7, lost 30, in flight 5; read again 20"
    ) in text


def test_a_view_keeps_the_newest_round_and_nothing_twice(
    run: Row, rounds: list[Row], events: list[Row]
) -> None:
    """It is up as long as the cluster: rounds are several kB each."""

    class Told:
        shown = 2

        def run(self, name: str) -> Row:
            return run

        def rounds(self, name: str, after: int = 0) -> list[Row]:
            return [r for r in rounds[: self.shown] if r["seq"] > (after or -1)]

        def events(self, name: str, after: int = 0) -> list[Row]:
            return [e for e in events if e["seq"] > (after or -1)]

    client: Any = Told()
    view, whole = Seen("demo", rounds_max=ROUNDS_VIEWED), Seen("demo")
    for client.shown in (2, 3, 5):
        view.look(client)
        whole.look(client)
    assert view.rounds == rounds[-1:] and whole.rounds == rounds
    assert view.events == whole.events == events
    assert lines(view) == lines(whole)
