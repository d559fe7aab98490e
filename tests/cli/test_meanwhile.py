"""What is seen while a command works or waits."""

import sys

import pytest

from diloco_cli.meanwhile import meanwhile


def shown_by(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, quiet: bool, tty: bool
) -> str:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    with meanwhile("counts the rounds", quiet=quiet):
        print("one")
    return capsys.readouterr().out


def test_a_terminal_shows_what_goes_on_and_what_is_printed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = shown_by(monkeypatch, capsys, quiet=False, tty=True)
    assert "counts the rounds" in shown and "one" in shown


def test_what_goes_on_may_change_meanwhile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    said = iter(["waits for [a]"])
    with meanwhile(lambda: next(said, "waits for [b]")):
        pass
    shown = capsys.readouterr().out
    assert "waits for [a]" in shown and "waits for [b]" in shown


@pytest.mark.parametrize(("quiet", "tty"), [(True, True), (False, False)])
def test_elsewhere_there_are_results_alone(
    quiet: bool, tty: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown_by(monkeypatch, capsys, quiet=quiet, tty=tty) == "one\n"
