"""256 learners and 24 fragments in `diloco sim train`: real machines, real numbers."""

import asyncio as corpus  # a package of the standard library: its text is what is learned
import resource
import time
from pathlib import Path
from typing import Any

from diloco_shared.spec.run import RunSpec
from diloco_simulator.experiments.setting import Setting
from diloco_simulator.experiments.train import Fleet


def spec(learners: int, fragments: int, cycles: int) -> RunSpec:
    """A model of 10 thousand parameters; every fragment merges `cycles` times."""
    shape = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 2, "head_width": 8, "hidden": 16}
    return RunSpec.model_validate(
        {
            "name": "scale",
            "algorithm": {"fragments": fragments, "sync_every_steps": 24},
            "model": {"context_tokens": 32, "overrides": shape},
            "data": {
                "source": str(Path(corpus.__file__).parent),
                "virtual_shards": learners,
            },
            "inner": {"batch_sequences": 2, "warmup_steps": 8},
            "membership": {"learners_min": learners, "learners_max": learners},
            "evaluation": {"every_steps": 10**6, "sequences": 64},
            "budget": {"steps": 24 * cycles},
        }
    )


def run(learners: int, fragments: int, cycles: int) -> dict[str, Any]:
    """What the run came to, and the processor seconds it took."""
    began = time.process_time()
    found = Fleet(spec(learners, fragments, cycles), Setting(learners)).run()
    kept = (
        "digest", "val_loss", "tokens", "tokens_useful", "rounds", "rounds_skipped",
        "merged_per_round", "virtual_s",
    )  # fmt: skip
    return {
        "learners": learners,
        "fragments": fragments,
        "steps": 24 * cycles,
        **{name: found[name] for name in kept},
        "processor_s": time.process_time() - began,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }
