"""When a server that ran out of disk is worth a new start."""

from pathlib import Path

import pytest

from diloco_shared.process import nats_server
from diloco_shared.process.nats_server import NO_SPACE, ROOM_BYTES, NatsServer


@pytest.mark.parametrize(("free", "stuck"), [(ROOM_BYTES, True), (0, False), (None, False)])
def test_it_is_started_anew_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int | None, stuck: bool
) -> None:
    """Without inodes there is none, and a file system that is away says nothing."""
    server = NatsServer(tmp_path, name="n")
    server.log_path.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(nats_server, "free_bytes", lambda _: free)
    assert not server.stuck(), "it has said nothing"
    server.log_path.write_bytes(b"[ERR] " + NO_SPACE)
    assert server.stuck() is stuck
