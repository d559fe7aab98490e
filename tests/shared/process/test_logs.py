"""Logs: readable by people or machines, and without secrets."""

import json
from collections.abc import Iterator

import pytest
import structlog

from diloco_shared.process.logs import configure


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging as it was, for the tests that follow."""
    yield
    structlog.reset_defaults()


def test_json_lines_carry_level_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", json=True)
    structlog.get_logger().warning("pull late", round=3)
    out, err = capsys.readouterr()
    line = json.loads(err)
    assert out == ""
    assert (line["event"], line["level"], line["round"]) == ("pull late", "warning", 3)
    assert line["timestamp"].endswith("Z")


def test_text_is_for_people_and_below_the_level_nothing_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("warning")
    structlog.get_logger().info("not this")
    structlog.get_logger().warning("but this", round=3)
    err = capsys.readouterr().err
    assert "not this" not in err
    assert "but this" in err
    assert "round=3" in err


@pytest.mark.parametrize("as_json", [True, False])
def test_no_secret_reaches_a_log(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    configure("info", json=as_json)
    structlog.get_logger().error(
        "no bus at nats://s3cret@10.0.0.1:4222",
        url="nats://user:s3cret@10.0.0.1:4222",
        nats_token="s3cret",
        Authorization="Bearer s3cret",
        tokens=4096,
    )
    err = capsys.readouterr().err
    assert "s3cret" not in err
    assert "nats://***@10.0.0.1:4222" in err
    assert "4096" in err, "counts of tokens are no secrets"


def test_an_unknown_level_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match="debug, info, warning or error"):
        configure("loud")
