"""The message server of the Compose file for one machine, started as its container starts it."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest
from places import COMPOSE, ROOT, compose
from waiting import until

from diloco_shared.bus.nats.bus import NatsBus
from diloco_shared.bus.port import StreamSpec, Unavailable
from diloco_shared.hub.nats_binary import find_binary
from diloco_shared.hub.nats_server import free_port
from diloco_shared.process.connecting import secret_in

pytestmark = pytest.mark.live

HOST = "127.0.0.1"


class Container:
    """What /data, /secret and /etc/nats.conf are in it lies in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self.monitor = free_port(HOST), free_port(HOST)
        for name in ("data", "secret", "etc", "bin"):
            (folder / name).mkdir()
        self.token = folder / "secret" / "token"
        (folder / "bin" / "nats-server").symlink_to(find_binary())
        self.configure((COMPOSE / "nats" / "nats.conf").read_text("utf-8"))

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text("utf-8")

    def configure(self, text: str) -> None:
        for there, here in (
            ("0.0.0.0:4222", f"127.0.0.1:{self.port}"),
            ("127.0.0.1:8222", f"127.0.0.1:{self.monitor}"),
            ("store_dir: /data", f"store_dir: {self.folder}/data"),
        ):
            assert there in text
            text = text.replace(there, here)
        (self.folder / "etc" / "nats.conf").write_text(text, "utf-8")

    def command(self) -> list[str]:
        words: list[str] = compose("compose.yaml")["nats"]["entrypoint"]
        keeper = words.index("diloco_shared.process.keep_hub") + 1
        at = ["--at", f"127.0.0.1:{self.port}", "--monitor", f"127.0.0.1:{self.monitor}"]
        return [self._here(word) for word in (*words[:keeper], *at, *words[keeper:])]

    def _here(self, word: str) -> str:
        if word == "python3":
            return sys.executable
        word = word.replace("/opt/hub/", f"{COMPOSE}/nats/")
        for place in ("/secret", "/data", "/etc"):
            word = f"{self.folder}{word}" if word.startswith(place) else word
            word = word.replace(f"={place}", f"={self.folder}{place}")
        return word

    @contextmanager
    def running(self) -> Iterator[None]:
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "shared")}
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(self.command(), env=environment, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)

    async def connected(self, token: str | None) -> NatsBus:
        """As soon as it listens."""

        async def try_it() -> NatsBus:
            return await NatsBus.connect(
                f"nats://127.0.0.1:{self.port}", name="test", token=token, timeout_s=2
            )

        bus: NatsBus = await until(try_it, tolerated=(Unavailable,))
        return bus


async def test_who_has_not_the_secret_of_its_volume_is_not_let_in(tmp_path: Path) -> None:
    container = Container(tmp_path)
    with container.running():
        await until(container.token.exists)
        token = secret_in(container.token)
        bus = await container.connected(token)
        await bus.close()
        for wrong in (None, "", token[:-1]):
            with pytest.raises(Unavailable, match="Authorization"):
                await NatsBus.connect(
                    f"nats://127.0.0.1:{container.port}", name="test", token=wrong, timeout_s=2
                )
    for path in (tmp_path / "secret").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert len(token) == 64 and token not in container.log


async def test_a_container_that_is_made_anew_has_the_same_secret_and_all_streams(
    tmp_path: Path,
) -> None:
    """And so has one that had none, from before there was a secret."""
    container = Container(tmp_path)
    text = (COMPOSE / "nats" / "nats.conf").read_text("utf-8")
    container.configure(text.replace("include ", "# include "))
    with container.running():
        bus = await container.connected(None)
        await bus.ensure_stream(StreamSpec("TAPE-r", ("tape.r.>",), 1 << 20))
        await bus.append("tape.r.0", b"a record")
        await bus.close()
    container.configure(text)
    tokens = set[str]()
    for _ in range(2):
        with container.running():
            tokens.add(secret_in(container.token))
            bus = await container.connected(secret_in(container.token))
            assert (await bus.stream_info("TAPE-r")).last_seq == 1
            await bus.close()
    assert len(tokens) == 1


async def test_the_keeper_is_let_in_and_logs_nothing_of_itself(tmp_path: Path) -> None:
    """Every two seconds it asks how the server is: who looks for strangers would see it alone."""
    container = Container(tmp_path)

    def connections() -> int:
        with urlopen(f"http://{HOST}:{container.monitor}/varz") as answer:
            return int(json.load(answer)["total_connections"])

    with container.running():
        before = await until(connections, tolerated=(OSError,))
        await until(lambda: connections() > before)
    assert "authentication error" not in container.log


def test_what_is_no_secret_starts_no_server(tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.token.write_text('" }\n')
    done = subprocess.run(container.command(), capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "holds no secret: remove it" in done.stderr
    assert not (tmp_path / "secret" / "authorization.conf").exists()
