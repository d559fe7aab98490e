"""The page about two data centers, typed as it stands: a network for each place."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from live.processes import COMPILED, tails
from live.test_sites import networks_here
from pages import DOCS, PLACED, Block, blocks
from waiting import wait_until

PAGE = DOCS / "how-to" / "two-data-centers.md"
PLACES = ("hub", "oslo", "bergen")
NAME = "hub.example.org"
# Of one block: it waits until learners have compiled, on cores that may be busy.
LIMIT_S = 400


class Places:
    """A namespace and a folder for each place, in which the hub's name leads to the hub."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tag = folder, f"walk{os.getpid()}"
        self.closing = ExitStack()
        self.binaries = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def open(self) -> None:
        for number, place in enumerate(PLACES):
            (self.folder / place).mkdir()
            self.ip("netns", "add", self.name(place))
            self.closing.callback(self.ip, "netns", "del", self.name(place))
            self.ip("-n", self.name(place), "link", "set", "lo", "up")
            self._named(place, f"10.202.{max(number, 1)}.1")
            if number:
                self._linked(place, number)

    def _linked(self, place: str, number: int) -> None:
        near, far = f"w{os.getpid() % 10**7}{number}h", f"w{os.getpid() % 10**7}{number}s"
        self.ip("link", "add", near, "type", "veth", "peer", "name", far)
        for at, link, end in ((PLACES[0], near, 1), (place, far, 2)):
            self.ip("link", "set", link, "netns", self.name(at))
            self.ip("-n", self.name(at), "address", "add", f"10.202.{number}.{end}/24", "dev", link)
            self.ip("-n", self.name(at), "link", "set", link, "up")

    def _named(self, place: str, address: str) -> None:
        """`ip netns exec` shows these files in the place of those in /etc."""
        hosts = Path("/etc/netns") / self.name(place) / "hosts"
        hosts.parent.mkdir(parents=True)
        self.closing.callback(shutil.rmtree, hosts.parent)
        hosts.write_text(f"127.0.0.1 localhost\n{address} {NAME}\n")

    def name(self, place: str) -> str:
        return f"{self.tag}-{place}"

    @staticmethod
    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def type(self, place: str, commands: str) -> str:
        """What a reader sees. Whatever stays in the background writes into files."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DILOCO_")}
        environment |= {"PATH": self.binaries, "DILOCO_CACHE": str(COMPILED), "DILOCO_THREADS": "1"}
        with tempfile.TemporaryFile() as seen:  # a pipe would be open as long as they are
            status = subprocess.run(
                ["ip", "netns", "exec", self.name(place), "bash", "-ec", commands],
                cwd=self.folder / place,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=seen,
                stderr=seen,
                timeout=LIMIT_S,
                check=False,
            ).returncode
            seen.seek(0)
            text = seen.read().decode(errors="replace")
        assert status == 0, f"at {place}: {commands}\n{text[-4000:]}"
        return text

    def carry(self) -> None:
        """What the page tells the reader to take from the hub to the data centers."""
        for place in PLACES[1:]:
            packed = self.folder / "hub" / f"{place}.tar"
            if packed.exists():
                assert stat.S_IMODE(packed.stat().st_mode) == 0o600, "it holds the site's keys"
                packed.rename(self.folder / place / packed.name)

    def left(self) -> list[psutil.Process]:
        """What runs in the background."""
        inside = f"{self.folder}/"
        found = psutil.process_iter(["cwd"])
        return [p for p in found if str(p.info["cwd"]).startswith(inside)]

    def end(self) -> None:
        for process in self.left():
            process.kill()


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    made = Places(tmp_path)
    with made.closing:
        made.open()
        made.closing.callback(made.end)
        try:
            yield made
        except BaseException:
            print(tails(sorted(tmp_path.glob("*/*.log"))))
            raise


def place_of(block: Block) -> str:
    return block.body.partition("\n")[0].removeprefix("# at ").removeprefix("the ")


@pytest.mark.live
@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not networks_here(), reason="needs root, and network namespaces")
def test_every_command_of_the_page_does_what_it_says(places: Places) -> None:
    typed = [b for b in blocks(PAGE) if b.language == PLACED]
    assert {place_of(b) for b in typed} == set(PLACES)
    seen: list[tuple[str, str]] = []
    for block in typed:
        if place_of(block) != PLACES[0]:
            places.carry()
        seen.append((block.body, places.type(place_of(block), block.body)))

    def shown(command: str) -> str:
        return next(text for body, text in seen if command in body)

    assert "this machine can work for the hub" in shown("diloco doctor")
    afterwards = shown("diloco site revoke").rpartition("learners: 1 is alive")[2]
    assert "bergen" not in afterwards, "it is on the list of sites no more"
    assert "run walk: stopped" in shown("diloco stop")
    assert "Traceback" not in "".join(text for _, text in seen)
    wait_until(lambda: not places.left(), "the end of every process", patience_s=LIMIT_S)
