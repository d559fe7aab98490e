"""Exports of whole worlds: each trouble comes about, and each broken promise is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.responses import FileResponse

from diloco_coordinator.api import exports_io
from diloco_coordinator.exports import sampling_io
from diloco_coordinator.exports.exporting_io import Exports
from diloco_coordinator.exports.exports import ExportRecord
from diloco_coordinator.exports.shelf_io import Shelf
from diloco_learner.exporting import observing_io as observing
from diloco_shared.protocol.exports import MANIFEST, ExportedFragment
from diloco_shared.protocol.messages import PublicationManifest
from diloco_shared.protocol.samples import SampleText
from diloco_simulator.checkers.exports import beside
from diloco_simulator.people import exporting as people
from diloco_simulator.people import sampling as reading
from diloco_simulator.worlds import exporting, sampling
from diloco_simulator.worlds.case import Case
from diloco_simulator.worlds.options import Options
from diloco_simulator.worlds.world import WorldResult, played

pytestmark = pytest.mark.whole

SHORT = Options.calm(steps=24, safety_s=30.0, learners=2, quorum=1)
RATES = ("DIES", "NOT_STARTED", "FULL", "CUT", "STANDS_STILL", "CHATTERS")

Rates = Callable[..., None]


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> Rates:
    """What exports meet, by rate; nothing that is not said."""

    def put(**said: float) -> None:
        for name in RATES:
            monkeypatch.setattr(exporting, name, said.pop(name, 0.0))
        for name, rate in said.items():
            monkeypatch.setattr(people, name, rate)

    return put


@pytest.fixture
def letting(rates: Rates, monkeypatch: pytest.MonkeyPatch) -> Rates:
    """What samples meet, by rate; models that can be let write, and exports that succeed."""

    def put(**said: float) -> None:
        rates(BY_ITSELF=1.0, REMOVES=0.0)
        for name in ("NOT_STARTED", "FAILS", "DIES", "HANGS", "CHATTERS"):
            monkeypatch.setattr(sampling, name, said.get(name, 0.0))
        monkeypatch.setattr(sampling, "KNOWN", 1.0)
        monkeypatch.setattr(reading, "COMERS", (5,))
        monkeypatch.setattr(reading, "TOGETHER", 1.0)

    return put


def world(seed: int = 2, options: Options = SHORT) -> WorldResult:
    return played(Case(seed, options, exports=True))


def test_exports_are_asked_for_and_made_by_themselves(rates: Rates) -> None:
    rates(BY_ITSELF=1.0, TWICE=1.0, REMOVES=1.0, LATE=1.0, DIES_AGAIN=1.0)
    found = world(seed=3)
    assert found.violations == [] and found.rounds > 0
    assert found.counts["exports made by themselves"] and found.counts["exports begun"]
    assert found.counts["exports looked at"] and found.counts["exports answered with 409"]
    assert found.counts["exports gone with their runs"] == 1 and found.counts["exports ready"]
    assert found.looks["exports"] and found.looks["samples"] and found.looks["deletion"]
    assert sum(n for what, n in found.counts.items() if what.startswith("exports removed")) == 1


def test_one_begun_after_the_last_round_needs_no_other_at_the_end(rates: Rates) -> None:
    rates(BY_ITSELF=1.0, TWICE=1.0, REMOVES=1.0, LATE=1.0, DIES_AGAIN=1.0)
    assert world(seed=7).violations == []


def test_whatever_an_export_meets_it_ends_and_leaves_nothing(rates: Rates) -> None:
    for trouble, counted in (
        ("CUT", "a coordinator dies over an export"),
        ("DIES", "an export's process dies"),
        ("FULL", "exports to a full disk"),
        ("STANDS_STILL", "a coordinator stands still over an export"),
    ):
        rates(**{trouble: 1.0}, BY_ITSELF=1.0)
        found = world()
        assert found.violations == [], trouble
        assert found.counts[counted], trouble
    rates(NOT_STARTED=1.0)
    assert world().counts["exports failed"]


def test_one_that_its_coordinator_did_not_live_to_see_has_failed(rates: Rates) -> None:
    rates(CUT=1.0, BY_ITSELF=1.0)
    assert world().counts["exports cut off by the coordinator's end"]


def test_a_world_without_them_is_as_it_was() -> None:
    """Old worlds have none, whatever is drawn for new ones."""
    assert not any("exports" in what for what in played(Case(2, SHORT)).counts)


def test_half_of_one_that_is_never_told_is_seen(
    rates: Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that comes back takes it for one that is being made."""

    async def prepare(self: Exports) -> None:
        self.records = {r.id: r for r in self.shelf.records()} if self.shelf.any else {}

    rates(CUT=1.0, BY_ITSELF=0.0, REMOVES=0.0)
    monkeypatch.setattr(Exports, "prepare", prepare)
    assert any("exports are not over" in v for v in world().violations)


def test_a_lost_record_is_seen(rates: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is ready is kept in memory alone."""
    save = Shelf.save

    def forgets(self: Shelf, record: ExportRecord) -> None:
        if record.state != "complete":
            save(self, record)

    rates(BY_ITSELF=0.0, REMOVES=0.0, DIES_AGAIN=1.0)
    monkeypatch.setattr(Shelf, "save", forgets)
    assert any("was complete, and changed" in v for v in world().violations)


def test_versions_of_two_times_are_seen(rates: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    described = observing._described

    def newer(m: PublicationManifest) -> ExportedFragment:
        return described(m).model_copy(update={"version": m.version + m.fragment})

    rates()
    monkeypatch.setattr(observing, "_described", newer)
    assert any("which was published with" in v for v in world().violations)


def test_what_outlives_its_run_is_seen(rates: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    rates(REMOVES=0.0)
    monkeypatch.setattr(Shelf, "remove", lambda self, record: None)
    said = world().violations
    assert any("of deleted runs there is still" in v for v in said)


def test_more_than_are_to_be_kept_are_seen(rates: Rates, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "diloco_coordinator.exports.exporting_io.surplus"
    rates(BY_ITSELF=1.0, REMOVES=0.0)
    monkeypatch.setattr(module, lambda *asked: [])
    assert any("exports are kept of" in v for v in world().violations)


def test_models_are_let_write_and_what_they_write_is_read(letting: Rates) -> None:
    letting()
    found = world(seed=3)
    assert found.violations == []
    assert found.counts["samples written once all is well"] == 1
    assert found.counts["samples begun"] > 1 and found.counts["samples answered with 429"]
    assert found.counts["files of exports taken home"]


def test_whatever_a_sample_meets_its_reader_is_told(letting: Rates) -> None:
    for trouble, status in (("FAILS", 422), ("NOT_STARTED", 422), ("DIES", 200), ("HANGS", 200)):
        letting(**{trouble: 1.0})
        found = world(seed=6)
        assert found.violations == [], trouble
        assert found.counts[f"samples answered with {status}"], trouble
        if status == 200:
            assert found.counts["samples that failed in the middle"], trouble


def test_a_piece_of_text_that_is_missing_is_seen(
    letting: Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is lost between the program and who reads."""
    bounded = sampling_io._bounded

    def leaky(queue: Any) -> Any:
        told = bounded(queue)
        return lambda line: told(line) if line != SampleText(text=" 0") else None

    monkeypatch.setattr(sampling_io, "_bounded", leaky)
    letting()
    assert any("a sample came as" in v or "is done after" in v for v in world(seed=3).violations)


def test_a_program_that_nobody_ends_is_seen(
    letting: Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(process: object) -> None: ...

    monkeypatch.setattr(sampling_io, "killed", killed)
    monkeypatch.setattr(sampling, "HANGS_S", 1e6)
    letting(HANGS=1.0)
    assert any("they still write" in v for v in world(seed=3).violations)


def test_a_file_that_comes_as_another_is_seen(
    rates: Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(path: Path, **of_it: Any) -> FileResponse:
        return FileResponse(path.with_name(MANIFEST), **of_it)

    monkeypatch.setattr(exports_io, "FileResponse", other)
    rates()
    assert any("comes as something else" in v for v in world(seed=3).violations)


def test_what_lies_there_and_is_shown_nowhere_is_named(tmp_path: Path) -> None:
    for name, files in (("a", ["record.json", "files"]), ("b", ["files"]), ("c", ["record.json"])):
        for file in files:
            (tmp_path / name / file).mkdir(parents=True)
    shown = {"a": "complete", "c": "complete"}
    assert beside(tmp_path, shown) == [
        "b is shown nowhere, and has ['files']",
        "c is complete, and has ['record.json']",
    ]
    assert beside(tmp_path, {"a": "running", "b": "running", "c": "failed"}) == []
