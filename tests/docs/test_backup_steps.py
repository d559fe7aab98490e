"""What backup.md tells to type to put a backup back goes wrong in no way that harms a hub.

Its blocks are executed by a shell that knows other programs of the names of docker, kubectl, sudo
and diloco. The volume of the message server is a folder of the test.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from docs.shown import PAGES, shown

# Each notes what it was told, and fails where it is told what FAILS says.
_STUB = r"""#!/bin/sh
said="${0##*/} $*"
echo "$said" >> "$LOG"
[ "$said" != "$FAILS" ] || exit 1
"""
_ENDS = {
    "sudo": 'exec "$@"',
    "diloco": "[ ! -e restored/jetstream ] || exit 1\n"
    'mkdir -p restored/jetstream && echo "$BACKUP" > restored/jetstream/backup',
    # A command in a container that has the volume.
    "docker": r"""
for last; do :; done
case "$*" in
*"sh nats -c "* | *"-- sh -c "*) exec sh -c "$(printf %s "$last" | sed "s#/data#$VOLUME#g")" ;;
*"tar nats -C /data -xf -" | *"-- tar -C /data -xf -") exec tar -C "$VOLUME" -xf - ;;
esac""",
}
_ENDS["kubectl"] = _ENDS["docker"]
# Another second at each call.
_DATE = '#!/bin/sh\necho >> "$LOG.dates"\nwc -l < "$LOG.dates"\n'
_STARTS = ("up -d --no-deps nats", "--replicas=1")


@dataclass
class Place:
    """Where a block is typed."""

    folder: Path

    @property
    def volume(self) -> Path:
        return self.folder / "volume"

    def type_(self, block: str, *, backup: str = "", fails: str = "") -> tuple[bool, list[str]]:
        """Whether it ended well, and what was told to whom."""
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "HUB_FOLDER": "/etc/diloco/hub",
            "LOG": str(log),
            "VOLUME": str(self.volume),
            "BACKUP": backup,
            "FAILS": fails,
        }
        shell = ("bash", "-c", block.replace("/opt/diloco/bin/", ""))
        done = subprocess.run(
            shell, cwd=self.folder, env=environment, capture_output=True, check=False
        )
        return done.returncode == 0, log.read_text("utf-8").splitlines() if log.exists() else []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "bin").mkdir()
    texts = {name: f"{_STUB}{end}\n" for name, end in _ENDS.items()} | {"date": _DATE}
    for name, text in texts.items():
        program = tmp_path / "bin" / name
        program.write_text(text, "utf-8")
        program.chmod(0o755)
    (tmp_path / "volume" / "jetstream").mkdir(parents=True)
    return Place(tmp_path)


def blocks() -> list[str]:
    """Those that put a backup back, and carry it to where the hub is."""
    (page,) = [each for each in PAGES if each.name == "backup.md"]
    found = [s.text for s in shown(page) if s.whole and "hub restore" in s.text and "tar" in s.text]
    assert len(found) == 2
    return found


@pytest.mark.parametrize("block", blocks(), ids=["compose", "kubernetes"])
def test_the_hub_gets_the_backup_however_often_one_was_put_back_before(
    block: str, place: Place
) -> None:
    """The store of an earlier time was carried once more, or unpacked over the one in use."""
    for time in "123":
        (place.volume / "jetstream" / f"live-{time}").touch()
        assert place.type_(block, backup=time)[0]
        assert [p.name for p in (place.volume / "jetstream").iterdir()] == ["backup"]
        assert (place.volume / "jetstream" / "backup").read_text() == f"{time}\n"
    aside = sorted(p.name for p in place.volume.glob("before-*/*") if "live" in p.name)
    assert aside == ["live-1", "live-2", "live-3"]


@pytest.mark.parametrize("block", blocks(), ids=["compose", "kubernetes"])
def test_after_an_error_the_hub_is_not_started(block: str, place: Place) -> None:
    well, told = place.type_(block, backup="1")
    assert well and told[-1].endswith(_STARTS)
    for each in told:
        well, then = place.type_(block, backup="2", fails=each)
        assert not well and each in then, each
        assert each == told[-1] or not then[-1].endswith(_STARTS), each
