"""Taking a backup of a hub, as far as no server is needed."""

import hashlib
import threading
from pathlib import Path
from typing import Any

import pytest

from diloco_shared.process import hub_backup

CONTENT = b"what the server sent"


async def test_the_connection_lives_while_a_stream_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another thread: for a large stream that takes minutes."""
    measured, seen = hub_backup._measured, set[threading.Thread]()

    async def save(*_: object) -> dict[str, Any]:
        return {"config": {}, "state": {"messages": 1}}

    def look(path: Path) -> tuple[int, str]:
        seen.add(threading.current_thread())
        return measured(path)

    monkeypatch.setattr(hub_backup.backups, "save", save)
    monkeypatch.setattr(hub_backup, "_measured", look)
    (tmp_path / "DN-a").write_bytes(CONTENT)
    link: Any = None
    found = await hub_backup._taken(link, "DN-a", tmp_path / "DN-a")
    assert found is not None
    assert (found.bytes, found.sha256) == (len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    assert seen and threading.current_thread() not in seen
