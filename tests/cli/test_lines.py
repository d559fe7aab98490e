"""Lines for people: cut between words in a terminal, whole elsewhere."""

import io

import pytest

from diloco_cli.lines import columns, fitted, say, shaped
from diloco_cli.words import reason_of


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_goes_on_below_its_last_column() -> None:
    line = "  keyframes  386.9 kB  4 x 4 bytes x the largest fragment: rounds in flight"
    assert fitted(line, 50) == [
        "  keyframes  386.9 kB  4 x 4 bytes x the largest",
        "                       fragment: rounds in flight",
    ]


def test_a_line_without_columns_goes_on_a_little_further_in() -> None:
    assert fitted("  it merged all that was there", 20) == ["  it merged all that", "    was there"]


def test_a_word_that_does_not_fit_below_a_column_gets_the_whole_width() -> None:
    path = "/srv/diloco/hub/credentials"
    assert fitted(f"written  credentials of the hub  {path}", 30) == [
        "written  credentials of the",
        "  hub",
        f"  {path}",
    ]


def test_a_column_that_is_too_narrow_for_a_word_of_its_own_is_not_gone_on_in() -> None:
    word = "w" * 30
    line = f"  name      what it is       text of several words and {word} at its end"
    assert fitted(line, 54)[1] == " " * 12 + f"{word} at its end"


def test_what_people_copy_stays_whole() -> None:
    path = "/" + "x" * 90
    assert fitted(f"see {path}", 80) == ["see", f"  {path}"]


@pytest.mark.parametrize("width", [80, 120, 200])
def test_nothing_is_lost_between_the_lines(width: int) -> None:
    text = " ".join(f"word{n}" for n in range(100))
    cut = fitted(text, width)
    assert all(len(line) <= width for line in cut) and " ".join(" ".join(cut).split()) == text


def test_a_pipe_gets_whole_lines_and_a_terminal_no_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "a word and another " * 20
    assert columns(io.StringIO()) is None
    assert list(shaped([line], None)) == [line]
    monkeypatch.setenv("COLUMNS", "72")
    assert columns(Tty()) == 72
    monkeypatch.delenv("COLUMNS")
    assert columns(Tty()) == 80, "nobody knows how wide it is"
    assert list(shaped(["\x1b[2J one\ntwo"], 40)) == ["\\x1b[2J one", "two"]


def test_bytes_of_a_name_that_are_no_letters_can_be_shown(
    capfdbinary: pytest.CaptureFixture[bytes],
) -> None:
    say("run a\udcff is stopped")
    assert capfdbinary.readouterr().out == b"run a\\udcff is stopped\n"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("3 of 3 ready, 2 needed", "3 of 3 learners are ready, and a merge needs 2"),
        ("1 of 1 ready, 1 needed", "1 of 1 learner is ready, and a merge needs 1"),
        ("1 contribution, 2 needed", "it had 1 contribution, and a merge needs 2"),
        ("merged 1 contribution", "it merged 1 contribution"),
        ("starved (0 train, 5 needed): wait", "starved (0 train, and a merge needs 5): wait"),
        ("0 contributions, 1 needed", "it had 0 contributions, and a merge needs 1"),
        ("as the user asked", "as the user asked"),
    ],
)
def test_what_a_syncer_says_in_few_words_is_told_in_a_sentence(said: str, told: str) -> None:
    assert reason_of(said) == told


def test_of_a_round_that_is_over_it_is_told_how_it_was() -> None:
    said = "1 of 3 ready, 2 needed; b has 1 of 4 steps"
    told = "1 of 3 learners were ready, and a merge needs 2; b had 1 of 4 steps"
    assert reason_of(said, past=True) == told
