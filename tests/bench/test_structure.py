"""What bench/structure.py counts: imports, circles, small files."""

import structure


def test_imports_for_types_alone_are_no_needs() -> None:
    source = (
        "import json, nats.errors\n"
        "from a.b import c\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import later\n"
        "def f():\n    from a import d\n"
    )
    assert structure.needed(source) == {
        "json",
        "nats.errors",
        "a.b.c",
        "typing.TYPE_CHECKING",
        "a.d",
    }


def test_a_circle_is_whoever_needs_one_another() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}, "e": {"a"}}
    found = structure.circles({module: frozenset(others) for module, others in graph.items()})
    assert found == [["b", "c"], ["d"]]


def test_the_table_has_every_package_and_every_count() -> None:
    found = structure.counted()
    assert found["circles"] == []
    assert all(place.startswith("shared/diloco_shared/bus/nats/") for place in found["nats"])
    total = found["total"]
    assert total["files"] == len(structure.modules())
    assert total["files"] - total["markers"] == sum(found["inner"].values())
    told = "\n".join(structure.table(found))
    assert f"{total['lines']:,}" in told and "circles of imports: 0" in told
    assert all(package in told for package in structure.PACKAGES)
