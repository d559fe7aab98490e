"""Forty and more attacks on a live cluster: each refused, logged, and nothing changed by it.

They are listed in `live/attacks` by what they go for: the message server, the REST interface, a
learner's files. All are played against one hub with TLS, two sites and a run that trains meanwhile
(live/attacks/scene.py). What they are refused by, and where that is logged with whom, stands with
each; docs/results/attacks.md is made of that.
"""

import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from live.attacks import bus, files, rest, shared_places
from live.attacks.cases import ATTACKS, Attack
from live.attacks.page import PAGE, page
from live.attacks.scene import Scene, Watcher, scene
from waiting import until

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]


async def fault_of(attack: Attack, at: Scene, watcher: Watcher) -> str:
    """What is wrong with how an attack was met; "" if nothing is."""
    at.hows.clear()
    before = await watcher.look()
    try:
        await attack.play(at)
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc(limit=-3)
    if attack.how not in at.hows:
        return f"it was not refused as the list says: {[how.refused for how in at.hows]}"
    changed = before.changed(await watcher.look())
    if attack.kind == "files":  # the run that was submitted ends, and its members go back

        async def as_before() -> bool:
            nonlocal changed
            changed = before.changed(await watcher.look())
            return not changed

        with suppress(AssertionError):
            await until(as_before, every_s=0.2, patience_s=30)
    return f"it changed {changed}" if changed else ""


async def test_every_attack_is_refused_and_logged_and_changes_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path) as (at, watcher), rest.never_ending(at) as at.slow:
        faults = {}
        for attack in ATTACKS:
            if fault := await fault_of(attack, at, watcher):
                faults[attack.name] = fault
        assert not faults, "\n\n".join(f"{name}\n{fault}" for name, fault in faults.items())
        assert at.running.data.exists() and await watcher.twice_merged() == []
        await watcher.goes_on()


def test_there_are_forty_of_every_kind_that_was_asked_for() -> None:
    kinds = Counter(attack.kind for attack in ATTACKS)
    assert len(ATTACKS) >= 40 and kinds.keys() == {"bus", "rest", "files"}
    assert {module.__name__ for module in (bus, shared_places, rest, files)}


def test_the_page_is_of_these_attacks() -> None:
    assert PAGE.read_text("utf-8") == page(), "make it anew: python -m live.attacks.page"
