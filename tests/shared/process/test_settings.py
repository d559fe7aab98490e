"""What a process is told by its environment: a secret from a file above all."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from diloco_shared.process.connecting import SECRET_BYTES_MAX
from diloco_shared.process.settings import ProcessSettings, WorkerSettings, said_of


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DILOCO_NATS_TOKEN", "DILOCO_NATS_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_the_token_may_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("s3cret\n")
    monkeypatch.setenv("DILOCO_NATS_TOKEN_FILE", str(file))
    assert ProcessSettings().nats_token == "s3cret"
    # A process that the coordinator starts is told both.
    monkeypatch.setenv("DILOCO_NATS_TOKEN", "s3cret")
    assert ProcessSettings().nats_token == "s3cret"


@pytest.fixture
def two_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One in a file, and another beside it."""
    file = tmp_path / "token"
    file.write_text("hidden-one")
    monkeypatch.setenv("DILOCO_NATS_TOKEN_FILE", str(file))
    monkeypatch.setenv("DILOCO_NATS_TOKEN", "hidden-two")


@pytest.mark.usefixtures("two_tokens")
def test_a_token_and_a_file_that_differ_are_refused_without_showing_either() -> None:
    with pytest.raises(ValidationError, match="differ: unset the one") as refused:
        ProcessSettings()
    assert "hidden" not in str(refused.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        (b"", "holds no secret"),
        (b"two\nlines", "holds no secret"),
        (b"x" * (SECRET_BYTES_MAX + 1), "holds no secret"),
    ],
)
def test_a_file_without_a_secret_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, why: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv("DILOCO_NATS_TOKEN_FILE", str(file))
    with pytest.raises(ValidationError, match=f"token {why}"):
        ProcessSettings()


def test_names_are_separated_by_commas_and_exclude_a_name_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DILOCO_ID", raising=False)
    monkeypatch.setenv("DILOCO_IDS", "oslo-1, oslo-2,")
    assert WorkerSettings().ids == ("oslo-1", "oslo-2")
    monkeypatch.setenv("DILOCO_IDS", "oslo.1")
    with pytest.raises(ValidationError, match="ids"):
        WorkerSettings()
    monkeypatch.setenv("DILOCO_IDS", "oslo-1")
    monkeypatch.setenv("DILOCO_ID", "oslo-1")
    with pytest.raises(ValidationError, match="DILOCO_ID and DILOCO_IDS are both given"):
        WorkerSettings()


@pytest.mark.usefixtures("two_tokens")
def test_what_is_wrong_is_said_in_one_line_without_what_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValidationError) as crossed:
        ProcessSettings()
    assert said_of(crossed.value).startswith("DILOCO_NATS_TOKEN")

    monkeypatch.delenv("DILOCO_NATS_TOKEN_FILE")
    monkeypatch.setenv("DILOCO_CHAOS", "hidden-three")
    monkeypatch.setenv("DILOCO_LOG_FORMAT", "hidden-four")
    with pytest.raises(ValidationError) as fields:
        ProcessSettings()
    said = said_of(fields.value)
    assert "DILOCO_CHAOS: " in said and "; DILOCO_LOG_FORMAT: " in said
    assert "hidden" not in said and "\n" not in said and "https://" not in said

    assert said_of(ValueError("these two belong together")) == "these two belong together"
