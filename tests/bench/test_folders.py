"""Tables by folder of the product: they add up, and the documentation shows those of today."""

import json
from pathlib import Path

import awaiting
import mutation
import worlds
from folders import by_folder, folder

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "docs" / "results"


def test_a_file_is_counted_in_its_own_folder_alone() -> None:
    assert folder("shared/diloco_shared/bus/nats/link.py") == "shared/bus/nats"
    assert folder("services/syncer/diloco_syncer/machine.py") == "syncer"
    files = {
        "shared/diloco_shared/bus/nats/link.py": (3, 1),
        "shared/diloco_shared/bus/port.py": (5, 5),
        "shared/diloco_shared/bus/nats/wire.py": (1, 1),
    }
    assert by_folder(files.items()) == {"shared/bus": [5, 5], "shared/bus/nats": [4, 2]}


def test_who_is_noticed_by_now_counts_for_today_alone() -> None:
    module = "services/syncer/diloco_syncer/rounds/gate.py"
    run = {
        "noticed_with_the_tests_that_are_there_now": 3,
        "modules": {module: {"mutants": 4, "survived": 2}},
        "survivors": [
            {"file": module, "is": "a real gap: a test is there now"},
            {"file": module, "is": "the length of a text"},
        ],
    }
    rows = mutation.table({"runs": [run, {"modules": {}, "survivors": []}]}).splitlines()
    assert rows[2:] == [
        "| syncer/rounds | 4 | 2 (50 %) | 3 (75 %) |",
        "| all | 4 | 2 (50 %) | 3 (75 %) |",
    ]


def test_where_too_little_is_executed_the_worst_files_are_named() -> None:
    def file(lines: int, executed: int) -> dict[str, int]:
        return {"lines": lines, "executed": executed}

    result = {
        "files": {
            "shared/diloco_shared/bus/nats/link.py": file(10, 0),
            "services/syncer/diloco_syncer/rounds/a.py": file(10, 9),
            "services/syncer/diloco_syncer/merging/a.py": file(10, 8),
        },
        "all": file(30, 17),
        "without_sockets": file(20, 17),
    }
    assert awaiting.table(result).splitlines()[2:] == [
        "| shared/bus/nats | 10 | 0 | 0 % | `link.py`: 10, sockets |",
        "| syncer/merging | 10 | 8 | 80 % | `a.py`: 2 |",
        "| syncer/rounds | 10 | 9 | 90 % |  |",
        "| all | 30 | 17 | 56.7 % |  |",
        "| all without sockets | 20 | 17 | 85.0 % |  |",
    ]


def test_the_page_shows_the_tables_of_the_committed_outputs() -> None:
    page = (RESULTS / "tests.md").read_text("utf-8")
    assert awaiting.table(json.loads((RESULTS / "awaiting.json").read_text("utf-8"))) in page
    assert worlds.table(worlds.later(RESULTS)) in page


def test_outputs_of_worlds_are_added_up_in_the_order_of_their_seeds(tmp_path: Path) -> None:
    output = {"seeds": 1200, "rounds": 7, "crashes": 3, "violations": 1}

    def table(*names: str) -> list[str]:
        for name in names:
            (tmp_path / name).write_text(json.dumps(output), "utf-8")
        return worlds.table(worlds.later(tmp_path)).splitlines()[2:]

    assert table("sim_101.json", "sim_63.json", "sim.json", "sim_63.txt") == [
        "| [sim_63](sim_63.json) | 1,200 | 7 | 3 | 1 |",
        "| [sim_101](sim_101.json) | 1,200 | 7 | 3 | 1 |",
        "| all | 2,400 | 14 | 6 | 2 |",
    ]
    first, *others, _ = table(*(f"sim_{number}.json" for number in range(102, 106)))
    before = "the 2 before, [sim_63](sim_63.json) to [sim_101](sim_101.json)"
    assert first == f"| {before} | 2,400 | 14 | 6 | 2 |" and len(others) == worlds.NEWEST
