"""Logs: readable by people or machines, and without secrets."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog
from full_disk import Full

from diloco_shared.process.logs import configure


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Logging as it was, for the tests that follow."""
    root = logging.getLogger()
    before = root.handlers
    yield
    root.handlers = before
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


def test_a_librarys_line_is_one_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", json=True)
    configure("info", json=True)
    library = logging.getLogger("nats.aio")
    try:
        raise ConnectionError("nats://user:s3cret@10.0.0.1:4222 refuses")
    except ConnectionError:
        library.exception("nats://s3cret@10.0.0.1: %d tries", 3)
    library.warning("%d arguments too few")
    (failed, odd) = map(json.loads, capsys.readouterr().err.splitlines())
    assert failed["event"] == "nats://***@10.0.0.1: 3 tries"
    assert (failed["level"], failed["library"]) == ("error", "nats.aio")
    assert "nats://***@10.0.0.1:4222 refuses" in failed["exception"]
    assert odd["event"] == "%d arguments too few"


def test_libraries_say_what_is_amiss_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info")
    library = logging.getLogger("asyncio")
    library.info("Using selector")
    library.warning("returning true from eof_received() has no effect when using ssl")
    library.log(logging.ERROR + 5, "of a level of its own")
    (line,) = capsys.readouterr().err.splitlines()
    assert "of a level of its own" in line and "error" in line


def test_a_library_is_not_heard_below_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    configure("error")
    logging.getLogger("httpx").warning("a retry")
    assert not capsys.readouterr().err


LOGS = """
import structlog
from diloco_shared.process.logs import configure
configure("info")
for number in range(1000):
    structlog.get_logger().error("a line that is lost", number=number)
print("went on")
"""


def test_a_full_disk_loses_lines_and_ends_nobody() -> None:
    with open("/dev/full", "wb") as full:
        said = subprocess.run(
            [sys.executable, "-c", LOGS], stdout=subprocess.PIPE, stderr=full, check=False
        )
    assert said.stdout == b"went on\n"
    # 120 is Python's word for what it could not write when all else had ended.
    assert said.returncode in (0, 120)


def test_lines_come_again_once_there_is_room() -> None:
    file = Full()
    configure("info", file=file)
    structlog.get_logger().warning("it is lost")
    file.full = False
    structlog.get_logger().warning("it is said")
    assert "it is said" in file.getvalue() and "it is lost" not in file.getvalue()


def test_an_unknown_level_is_an_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match="debug, info, warning or error"):
        configure("loud")
