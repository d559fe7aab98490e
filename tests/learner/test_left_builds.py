"""A model that is still built for a run that was left: no thread can be ended from outside."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from learner.contexts import learner
from learner.test_app import compiled, stepping
from shared.corpora.texts import folder_of
from waiting import until

from diloco_learner import app as apps
from diloco_learner.app import WAITS, Learner
from diloco_learner.data.cache import CorpusCache
from diloco_learner.data.corpus import digest, load
from diloco_learner.training import computing_io
from diloco_learner.training.computing_io import Check, LeftBehind, OnThisMachine, go_on
from diloco_learner.training.trainer import Program
from diloco_shared.corpora import folders
from diloco_shared.corpora.prepared import Corpus
from diloco_shared.reach.local import Reach
from diloco_shared.spec.run import Data, RunSpec
from diloco_simulator.hub.broker import MemoryBroker

ANYWHERE = Reach(Path("/"))


class Building(OnThisMachine):
    """The first build waits where it reads weights until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(ANYWHERE)
        self.reads, self.goes_on = threading.Event(), threading.Event()
        self.begun, self.trainers = 0, list[int]()
        self.first: list[BaseException | None] = []  # how it ended
        self.own = threading.local()  # its `number`

    def build(self, spec: RunSpec, check: Check = go_on, **how: Any) -> Any:
        self.begun += 1
        self.own.number = self.begun
        try:
            built, fault = super().build(spec, check, **how), None
        except BaseException as error:
            fault = error
            raise
        finally:
            if self.own.number == 1:
                self.first.append(fault)
        return built

    def trainer(self, *of: Any) -> Any:
        self.trainers.append(self.own.number)
        return super().trainer(*of)

    def beginning(self, *of: Any, **more: Any) -> None:
        """In the place of `beginning_of`."""
        if self.own.number == 1:
            self.reads.set()
            self.goes_on.wait(60.0)


@pytest.fixture
def building(monkeypatch: pytest.MonkeyPatch) -> Iterator[Building]:
    """Its work gets no time to leave by itself; the program is compiled once."""
    found = Building()
    monkeypatch.setattr(apps, "LEAVES_S", 0.01)
    monkeypatch.setattr(Program, "build", compiled)
    monkeypatch.setattr(computing_io, "beginning_of", found.beginning)
    yield found
    found.goes_on.set()


async def submitted_again(syncer: Any, app: Learner) -> None:
    """The run is deleted, and there again."""
    await syncer.assign("a", "")
    await until(lambda: app.membership.record.state == "idle")
    await syncer.assign("a", "r")


@pytest.mark.whole
async def test_the_next_run_waits_for_what_is_still_built_for_the_one_before(
    broker: MemoryBroker, syncer: Any, tmp_path: Path, building: Building
) -> None:
    """A device has no room for both. However often the run is submitted meanwhile."""
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a", building) as (app, _):
        await until(building.reads.is_set, "a build that reads")
        for _ in range(2):
            await submitted_again(syncer, app)
            await until(lambda: app.membership.record.reason == WAITS, "a reason")
        assert building.begun == 1 and building.devices == ()
        building.goes_on.set()
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        assert app.membership.record.reason == ""
    assert isinstance(building.first[0], LeftBehind)
    assert building.trainers == [2], "nobody makes a trainer for the run that was left"


@pytest.mark.whole
async def test_what_hangs_holds_no_run_up_for_ever_and_takes_nothing_from_the_next(
    broker: MemoryBroker,
    syncer: Any,
    tmp_path: Path,
    building: Building,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(apps, "ALONE_S", 0.01)
    await syncer.prepare()
    await syncer.assign("a", "r")
    async with syncer.serving(), learner(broker, tmp_path, "a", building) as (app, _):
        await until(building.reads.is_set, "a build that reads")
        await submitted_again(syncer, app)
        await syncer.bootstrap("a")
        await syncer.reported("a", stepping)
        devices = building.devices
        assert building.first == [], "it hangs still"
        building.goes_on.set()
        await until(lambda: bool(building.first), "the end of the first build")
        assert isinstance(building.first[0], LeftBehind)
        assert building.trainers == [2] and building.devices is devices


def test_weights_are_not_read_to_their_end_for_nobody(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take minutes, on the disk and the way that the next run needs."""
    read = list[int]()

    def beginning(*of: Any, moved: Check) -> None:
        for piece in range(9):
            read.append(piece)
            moved()

    def check() -> None:
        if len(read) == 3:
            raise LeftBehind

    monkeypatch.setattr(computing_io, "beginning_of", beginning)
    with pytest.raises(LeftBehind):
        OnThisMachine(ANYWHERE).build(spec, check)
    assert read == [0, 1, 2]


def test_a_build_that_begins_too_late_touches_nothing(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread may have waited for others while its work ended."""

    def check() -> None:
        raise LeftBehind

    monkeypatch.setattr(computing_io, "load", lambda *of: pytest.fail("it reads"))
    with pytest.raises(LeftBehind):
        OnThisMachine(ANYWHERE).build(spec, check)


def leaves_at(number: int) -> Callable[[], None]:
    """A check that raises when it is made for the so-manieth time, and ever after."""
    made = 0

    def check() -> None:
        nonlocal made
        made += 1
        if made >= number:
            raise LeftBehind

    return check


def test_a_text_is_not_prepared_to_its_end_for_nobody(
    spec: RunSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes hours on all cores, and a disk, that the next run needs."""
    monkeypatch.setattr("diloco_shared.corpora.prepare.CHUNK_BYTES", 100)
    data = Data(source=str(folder_of(tmp_path / "a", 60)), validation_fraction=0.2)
    mistaken = spec.model_copy(update={"data": data})
    with pytest.raises(LeftBehind):
        OnThisMachine(ANYWHERE, CorpusCache(tmp_path / "cache")).build(mistaken, leaves_at(5))
    assert list((tmp_path / "cache").iterdir()) == [], "nothing of it takes room"


def test_tokens_are_not_read_to_their_end_for_nobody(tmp_path: Path) -> None:
    file, cache = tmp_path / "t.bin", CorpusCache(tmp_path / "cache")
    np.arange(5000, dtype=np.uint16).tofile(file)
    file.with_suffix(".json").write_text('{"vocabulary": 5000}')
    data = Data(source=str(file))
    wanted = data.model_copy(update={"digest": digest(load(data))})
    with pytest.raises(LeftBehind):
        load(wanted, cache=cache, check=leaves_at(3))
    assert list(cache.folder.iterdir()) == [], "its digest is not known yet"
    load(wanted, cache=cache)


def test_who_waited_for_another_one_that_prepares_looks_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_learner.data.cache.prepare_locked", None)  # nobody may
    data = Data(source=str(folder_of(tmp_path / "a", 60)))
    with pytest.raises(LeftBehind):
        load(data, cache=CorpusCache(tmp_path / "cache"), check=leaves_at(1))


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_who_waits_for_another_one_goes_on_to_look_whether_anybody_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The other one may prepare a text, or read a file, for hours."""
    file = tmp_path / "t.bin"
    np.arange(5000, dtype=np.uint16).tofile(file)
    file.with_suffix(".json").write_text('{"vocabulary": 5000}')
    data = Data(source=str(folder_of(tmp_path / "a", 60) if kind == "text" else file))
    cache, other = CorpusCache(tmp_path / "cache"), contextlib.ExitStack()
    taken = list[Path]()

    def read(check: Callable[[], object]) -> str:
        corpus = load(data, cache=cache, check=check)
        assert isinstance(corpus, Corpus)
        return cache.digest(corpus, file, check)

    def watched(folder: Path, **how: Any) -> Any:
        taken.append(folder)
        return folders.locked(folder, **how)

    for module in ("cache", "digests"):
        monkeypatch.setattr(f"diloco_learner.data.{module}.locked", watched)
    monkeypatch.setattr(folders, "LOOK_S", 0.0)
    with pytest.raises(LeftBehind):
        read(leaves_at(2))  # so it is known of which folder
    # Whoever does not look does not wait for ever either.
    watch = threading.Timer(30.0, other.close)
    watch.start()
    other.enter_context(folders.locked(taken[0], wait=False))
    with pytest.raises(LeftBehind):
        read(leaves_at(5))
    assert watch.is_alive(), "it left while the other one had it"
    lets_go = itertools.chain([None, None, other.close], itertools.repeat(None))
    assert read(lambda: (step := next(lets_go)) and step())
    watch.cancel()
