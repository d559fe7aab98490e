"""Two syncer shards of one run, driven side by side."""

from typing import Any

from diloco_shared.protocol.messages import (
    TapeCheckpoint,
    TapeEnd,
    TensorSpec,
)
from diloco_shared.spec.fragmentation import Layout
from diloco_shared.spec.run import config_hash
from diloco_syncer.events import (
    Capture,
    InitSeen,
    SendPull,
)
from diloco_syncer.history.history import History
from diloco_syncer.machine import Machine

# As the driver's learners have it.
TENSORS = (
    TensorSpec(name="a", shape=(8,), embedding=False),
    TensorSpec(name="b", shape=(6,), embedding=True),
)
ALGORITHM = {"fragments": 4, "shards": 2, "sync_every_steps": 8, "overlap_steps": 1}


def begun(driver_of: Any, shard: int) -> Any:
    """A driver of one shard, initialised; learners a and b step."""
    driver = driver_of(**ALGORITHM)
    driver.machine = Machine(driver.spec, History(driver.spec, shard))
    driver.lead()
    owned = driver.spec.algorithm.owned(shard)
    for learner in ("a", "b"):
        driver.adopted_at[learner] = [0, 0, 0, 0]
        driver.join(learner)
    subjects = tuple(f"up.t.a.init.{p}.0" if p in owned else "" for p in range(4))
    digests = tuple(f"{p:032x}" if p in owned else "" for p in range(4))
    sizes = tuple(n if p in owned else 0 for p, n in enumerate(Layout.build(TENSORS, 4).sizes))
    driver.give(InitSeen("a", 0, config_hash(driver.spec), TENSORS, subjects, digests, sizes, True))
    for learner in ("a", "b"):
        driver.step(learner, 0)
    return driver


def rounds(driver: Any, steps: int) -> list[tuple[int, int, int]]:
    """(step, round, fragment) of the pulls while both learners step side by side."""
    seen = []
    for _ in range(steps):
        for learner in ("a", "b"):
            for effect in driver.step(learner):
                if isinstance(effect, SendPull):
                    pull = effect.pull
                    seen.append((driver.steps["a"], pull.round, pull.fragment))
                    for one in ("a", "b"):
                        driver.answer(pull, one)
                        driver.adopted_at[one][pull.fragment] = driver.steps[one]
    return seen


def over(driver: Any) -> Any:
    """The driver, behind the end of its tape."""
    h = driver.machine.history
    end = TapeEnd(term=h.term, outcome="finished", reason="", versions=tuple(h.versions), at=9.0)
    driver.tape.append(end)
    h.apply(end, len(driver.tape))
    return driver


def marks(driver: Any) -> list[tuple[int, str]]:
    return [(r.number, r.outcome) for r in driver.tape if isinstance(r, TapeCheckpoint)]


def captured(effects: list[Any]) -> list[int]:
    return [e.number for e in effects if isinstance(e, Capture)]
