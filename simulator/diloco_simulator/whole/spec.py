"""The run of a world, as its user submits it."""

from diloco_shared.config import RunSpec
from diloco_simulator.options import Options


def spec_of(options: Options, seed: int) -> RunSpec:
    """Small: some dozen steps of a second, leases of seconds."""
    return RunSpec.model_validate(
        {
            "name": "sim",
            "seed": seed,
            "algorithm": {
                "fragments": options.fragments,
                # Divisible by the number of fragments, and several steps of a slow learner.
                "sync_every_steps": 8 if options.fragments == 4 else 6,
                "shards": options.shards,
                "overlap_steps": options.overlap_steps,
                "quorum": options.quorum,
                "keyframe_every": options.keyframe_every,
                "codec_up": options.codec_up,
                "weighting": options.weighting,
                "codec_down": options.codec_down,
                "pull_timeout_s_min": 3.0,
                # Few enough that there are outliers in runs as short as these.
                "outlier_samples_min": 8,
            },
            "membership": {
                "learners_min": options.learners,
                "learners_max": options.learners + options.learners_spare,
                "lease_s": 5.0,
                "heartbeat_s": 1.0,
            },
            "keeping": {
                "snapshot_every_rounds": options.snapshot_every_rounds,
                "begin_again_after_s": 13.0,  # longer than most processes are away
                "checkpoint_every_steps": 10,
                "run_checkpoint_every_steps": options.checkpoint_every_steps,
            },
            "budget": _budget(options),
        }
    )


def _budget(options: Options) -> dict[str, float]:
    """About as many steps, whatever it is counted in: 512 tokens a step, a step a second."""
    amounts = {
        "steps": options.steps,
        "tokens": options.steps * 512 * options.learners,
        "seconds": options.steps * options.step_s,
    }
    return {options.budget: amounts[options.budget]}
