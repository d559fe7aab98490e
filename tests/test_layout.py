"""Where things lie: what awaits apart from what decides, no circles, no crumbs."""

import ast

from structure import MARKER, ROOT, SMALL_LINES, circles, imports, modules

# Of the product's services and what they share: these files await, besides those named *_io.py.
ENTRIES = ("app", "__main__", "settings")
AWAITING = ("diloco_shared.bus", "diloco_shared.process")
SERVICES = ("diloco_shared", "diloco_syncer", "diloco_learner", "diloco_coordinator")
# A file is one idea, and not a crumb of one.
SMALL_MAX = 45
# Of services and what they share, these alone ask the machine for time and chance: see `ambient`.
UNPLAYED = (
    "diloco_shared.ambient",
    "diloco_shared.bus.nats",
    "diloco_shared.process.nats_",
    "diloco_shared.process.hub_leaves",
    "diloco_shared.process.hub_watch",
    "diloco_shared.process.keep_hub",
)
ASKED = {"time.monotonic", "time.time", "uuid.uuid4", "secrets.token_hex"}
LAST_OF_ASKED = {asked.rpartition(".")[2] for asked in ASKED}


def awaits(module: str) -> bool:
    last = module.rpartition(".")[2]
    return last.endswith("_io") or last in ENTRIES or module.startswith(AWAITING)


def test_what_decides_imports_nothing_that_awaits() -> None:
    faults = [
        f"{module} imports {other}: name it {module.rpartition('.')[2]}_io.py, or turn it round"
        for module in modules()
        if module.startswith(SERVICES) and not awaits(module)
        for other in imports(module)
        if awaits(other)
    ]
    assert not faults, "\n".join(faults)


def test_no_module_needs_itself_in_a_circle() -> None:
    assert circles({m: imports(m) for m in modules()}) == []


def test_few_files_are_crumbs() -> None:
    small = [
        f"{path.relative_to(ROOT)}: {lines}"
        for path in modules().values()
        if path.name != MARKER and (lines := path.read_text("utf-8").count("\n")) < SMALL_LINES
    ]
    assert len(small) <= SMALL_MAX, "\n".join(small)


def test_what_worlds_play_is_told_time_and_chance() -> None:
    """Or a seed would not play the same world again."""
    asking = {
        f"{module}: {ast.unparse(node)}"
        for module, path in modules().items()
        if module.startswith(SERVICES) and not module.startswith(UNPLAYED)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in LAST_OF_ASKED
        and ast.unparse(node) in ASKED
    }
    assert not asking


# Orders of process 0 to the others: written `plan.…` wherever they are used.
QUALIFIED = "diloco_learner.hosts.plan"


def test_a_class_has_its_name_for_itself_in_its_package() -> None:
    """One word for one idea. What another package calls so is told apart by its imports."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, path in modules().items():
        if module == QUALIFIED:
            continue
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault((module.partition(".")[0], node.name), []).append(module)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}
