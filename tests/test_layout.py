"""Where things lie: what awaits apart from what decides, no circles, no crumbs."""

import ast
import re

import pytest
from names import meant
from structure import MARKER, ROOT, SMALL_LINES, circles, imports, modules

# Of the product's services and what they share: these files await, besides those named *_io.py.
ENTRIES = ("app", "__main__", "settings")
AWAITING = ("diloco_shared.bus", "diloco_shared.hub", "diloco_shared.process")
# What lies among them and is pure all the same; pyproject.toml excuses the others of `hub` by name.
PURE = ("diloco_shared.hub.certificates",)
SERVICES = ("diloco_shared", "diloco_syncer", "diloco_learner", "diloco_coordinator")
# A file is one idea, and not a crumb of one.
SMALL_MAX = 45
# Of services and what they share, these alone ask the machine for time and chance: see `ambient`.
UNPLAYED = (
    "diloco_shared.ambient",
    "diloco_shared.bus.nats",
    "diloco_shared.hub.leaves",
    "diloco_shared.hub.nats_",
    "diloco_shared.hub.watch",
    "diloco_shared.process.keep_hub",
)
# `time.sleep` tells nothing: threads beside what is played wait so. uuid3 and uuid5 are digests.
ASKED = re.compile(
    r"time\.(?!sleep$)\w+|random\.\w+|secrets\.\w+|uuid\.(?:uuid[14]|getnode)"
    r"|os\.(?:urandom|getrandom)|datetime\.datetime\.(?:now|utcnow|today)|datetime\.date\.today"
    r"|numpy\.random\.\w+"
)
# Whoever gives these a seed is told chance; without one they ask the machine for it.
SEEDED = {"random.Random", "numpy.random.default_rng"}
# What a module may ask besides.
MAY_ASK = {
    # How long its own thread computed, which no clock of a world knows; no world is watched so.
    "diloco_shared.process.loop_watch": {"time.thread_time"},
    # Certificates that are signed: by a command of whoever keeps a hub, which no world types.
    "diloco_shared.hub.folder": {"datetime.datetime.now"},
}


def awaits(module: str) -> bool:
    last = module.rpartition(".")[2]
    excused = module.startswith(AWAITING) and module not in PURE
    return last.endswith("_io") or last in ENTRIES or excused


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


def asked(source: str) -> set[str]:
    """What a module asks the machine for time and chance, under whichever names it imports it."""
    tree = ast.parse(source)
    given = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call) and n.args}
    return {
        name
        for node, name in meant(tree)
        if ASKED.fullmatch(name) and not (name in SEEDED and id(node) in given)
    }


def test_what_worlds_play_is_told_time_and_chance() -> None:
    """Or a seed would not play the same world again."""
    asking = {
        f"{module}: {each}"
        for module, path in modules().items()
        if module.startswith(SERVICES) and not module.startswith(UNPLAYED)
        for each in asked(path.read_text("utf-8")) - MAY_ASK.get(module, set())
    }
    assert not asking


@pytest.mark.parametrize("module", MAY_ASK)
def test_nobody_may_ask_what_nobody_asks(module: str) -> None:
    assert MAY_ASK[module] <= asked(modules()[module].read_text("utf-8"))


def test_whoever_asks_for_time_and_chance_is_seen_however_it_is_written() -> None:
    for code in (
        "import time\ntime.perf_counter()",
        "import time as t\nt.monotonic_ns()",
        "from time import time_ns\ntime_ns()",
        "import secrets\nsecrets.token_urlsafe(32)",
        "from secrets import choice as one_of\none_of([1])",
        "import os\nos.urandom(4)",
        "from uuid import uuid1\nuuid1()",
        "import random\nrandom.shuffle([])",
        "from random import Random\nRandom()",
        "from datetime import UTC, datetime\ndatetime.now(UTC)",
        "import numpy as np\nnp.random.default_rng()",
        "import numpy as np\nnp.random.rand()",
    ):
        assert asked(code), code
    for code in (
        "import time\ntime.sleep(1)",
        "from random import Random\nRandom(5).random()",
        "import numpy as np\nnp.random.default_rng(5)",
        "import jax\njax.random.key(0)",
        "from jax import random\nrandom.key(0)",
        "secrets = {}\nsecrets.get('a')",
        "from datetime import datetime\ndatetime.fromisoformat('')",
    ):
        assert not asked(code), code


# Orders of process 0 to the others: written `plan.…` wherever they are used.
QUALIFIED = "diloco_learner.hosts.plan"


# Whoever calls with more than so many can hardly see which is which: group what belongs together.
ARGUMENTS_MAX = 8
MANY_ARGUMENTS = {
    # Settings of another program, of which nearly every caller gives one or two, by name.
    ("diloco_shared.hub.nats_server", "NatsServer"),
}


def arguments(made: ast.FunctionDef) -> int:
    """Of a method, `self` apart."""
    return len([*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs]) - 1


def test_a_constructor_has_few_arguments() -> None:
    many = {
        (module, node.name): arguments(made)
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.ClassDef)
        for made in node.body
        if isinstance(made, ast.FunctionDef)
        if made.name == "__init__" and arguments(made) > ARGUMENTS_MAX
    }
    assert many.keys() == MANY_ARGUMENTS, many


# What is called alike in a service and in what they share. Whoever reads the one name in a service
# must not wonder which of both is meant.
CALLED_ALIKE = {
    # Events tell it to people: "Damaged: …". Each says of its own kind of file what it is.
    "Damaged",
}


def classes() -> dict[tuple[str, str], list[str]]:
    """(package, name) of what others see -> modules that have one."""
    found: dict[tuple[str, str], list[str]] = {}
    for module, path in modules().items():
        if module == QUALIFIED:
            continue
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault((module.partition(".")[0], node.name), []).append(module)
    return found


def test_a_class_has_its_name_for_itself_in_its_package() -> None:
    """One word for one idea. What another package calls so is told apart by its imports."""
    assert {name: where for name, where in classes().items() if len(where) > 1} == {}


def test_nor_is_it_called_as_what_services_share() -> None:
    shared, *services = SERVICES
    found = classes()
    alike = {name for package, name in found if package in services and (shared, name) in found}
    assert alike == CALLED_ALIKE
