"""What a wrong set-up is, and what is told of it; what passes by itself is none."""

import errno
import os
import pwd
import socket
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from diloco_shared.process.health import Health, HealthServer
from diloco_shared.process.membership import DataFolder
from diloco_shared.process.set_up import AddressTaken, WrongSetUp, owner, user, writing


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_somebody_elses_data_folder_is_named_with_what_to_do(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refused(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(number, os.strerror(number), str(path))
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(WrongSetUp) as error:
        DataFolder.claim(tmp_path, "learner", "a")
    assert error.value.status == 2
    me = pwd.getpwuid(os.geteuid()).pw_name
    assert str(error.value) == (
        f"DILOCO_DATA={tmp_path}: {tmp_path / 'a' / 'lock'} cannot be written "
        f"({os.strerror(number).lower()}): give the folder to the user of this process ({me}), or "
        "name another folder"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_a_disk_that_is_full_or_fails_is_a_fault_that_passes(number: int, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=os.strerror(number)), writing(tmp_path):
        raise OSError(number, os.strerror(number))


async def test_a_port_that_is_taken_is_named_with_the_setting() -> None:
    server = HealthServer(lambda: Health(True, {}), CollectorRegistry())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(AddressTaken) as error:
            await server.start("127.0.0.1", port)
    assert str(error.value) == (
        f"port {port} of 127.0.0.1 is taken: set DILOCO_HEALTH_PORT to another one, or to 0 for a "
        "free one"
    )
    with pytest.raises(AddressTaken, match=r"192\.0\.2\.1:0 .*see DILOCO_HEALTH_HOST"):
        await server.start("192.0.2.1", 0)
    assert issubclass(AddressTaken, WrongSetUp)


def test_an_owner_is_told_by_name(tmp_path: Path) -> None:
    me = pwd.getpwuid(os.geteuid()).pw_name
    # Who may not look into a folder is told whose that is.
    assert owner(tmp_path) == owner(tmp_path / "none" / "none") == me
    assert user(2**31 - 2) == f"user {2**31 - 2}"
