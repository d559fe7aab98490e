"""What the anchors of an island of several hosts take: of process 0's memory, and of its steps.

    python bench/island_anchors.py [--models 35m 150m] [--hosts 2] [--times 15] [--json FILE]

The hosts are processes on this machine, with a device each.

kept_bytes: of the anchors of all fragments, what process 0 has in its memory, whole or its parts,
measured as the growth of its own memory (USS).

sending_s: an anchor is sent, to each host its part, when it was taken in. adopt_s: an order says
which anchor is adopted, and that is done, until the next step may begin. Were an anchor sent when
it is adopted, the next step would begin after both. ratio: of adopt_s to both.

step_s: of a step by itself, and while another thread does without a pause what it does for every
publication: gathers the anchor that a delta adds to, and gives the new one away. In a run that is
done once for H / P steps.

Figures are medians. Between the processes is loopback, which is faster than a network. Where the
link between hosts has B bytes/s, sending cannot be shorter than (hosts - 1) / hosts of a fragment
over B; that is given as sending_10gbit_s.
"""

import ctypes
import gc
import statistics
import threading
from functools import partial
from typing import Any

from island_checkpoints import LINK_BYTES_PER_S, SEED, each_model, took, trained

# Steps of each way, which on a processor take seconds.
STEPS = 5


def measured(others: Any, hosts: int, model: str, times: int, place: str) -> dict[str, Any]:
    """Of one island."""
    import numpy as np

    trainer, tokens = trained(others, hosts, model)
    sizes = trainer.program.layout.sizes
    rng = np.random.default_rng(SEED)

    def anchor(p: int) -> Any:
        return (0.02 * rng.standard_normal(sizes[p])).astype(np.float32)

    def step() -> float:
        return took(lambda: float(trainer.step(tokens, 1e-4)))

    def growth(make: Any) -> tuple[Any, int]:
        before = own_memory()
        made = make()
        return made, own_memory() - before

    for p in range(len(sizes)):
        trainer.adopt(p, anchor(p), 0.0)  # nothing compiles any more
    # Two sets of them, as where one was adopted and the next one is there.
    parts, kept = growth(lambda: [trainer.hold(p, anchor(p)) for p in range(len(sizes))])
    wholes, whole = growth(lambda: [anchor(p) for p in range(len(sizes))])
    for _ in range(3):
        step()
    ways: dict[str, list[float]] = {"sending": [], "adopt": [], "alone": [], "beside": []}
    for n in range(times):
        p = n % len(sizes)
        ways["sending"].append(took(partial(trainer.hold, p, wholes[p])))
        ways["adopt"].append(took(partial(adopted, trainer, p, parts[p])))
    for n in range(min(times, STEPS)):
        ways["alone"].append(step())
        with Taking(trainer, parts, wholes, n % len(sizes)):
            ways["beside"].append(step())
    median = {name: statistics.median(values) for name, values in ways.items()}
    fragment = 4 * max(sizes)
    return {
        "anchor_bytes": 4 * sum(sizes),
        "kept_bytes": {"whole": whole, "parts": kept, "ratio": round(kept / whole, 3)},
        "fragment_bytes": fragment,
        "boundary": {
            "sending_s": round(median["sending"], 4),
            "adopt_s": round(median["adopt"], 4),
            "ratio": round(median["adopt"] / (median["sending"] + median["adopt"]), 3),
            "sending_10gbit_s": round(fragment * (hosts - 1) / hosts / LINK_BYTES_PER_S, 4),
        },
        "step_s": {
            "alone": round(median["alone"], 4),
            "beside": round(median["beside"], 4),
            "ratio": round(median["beside"] / median["alone"], 3),
        },
    }


def adopted(trainer: Any, p: int, anchor_F: Any) -> None:
    import jax

    trainer.adopt(p, anchor_F, 0.0)
    jax.block_until_ready(trainer.params)


def own_memory() -> int:
    import psutil

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not taken for growth
    return int(psutil.Process().memory_full_info().uss)


class Taking:
    """Publications of one fragment, one after another, as long as this lasts."""

    def __init__(self, trainer: Any, parts: list[Any], wholes: list[Any], p: int) -> None:
        self.over = threading.Event()
        self.work = threading.Thread(target=self._take, args=(trainer, parts[p], wholes[p], p))

    def _take(self, trainer: Any, held: Any, whole: Any, p: int) -> None:
        import numpy as np

        while not self.over.is_set():
            np.asarray(held)
            trainer.hold(p, whole)

    def __enter__(self) -> None:
        self.work.start()

    def __exit__(self, *exc: Any) -> None:
        self.over.set()
        self.work.join()


if __name__ == "__main__":
    each_model(__doc__, measured, __file__, 15)
