"""What everybody in the race is told, and how its outcome is judged: by this project's code."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.up.stack import free_port
from diloco_learner.data.corpus import load
from diloco_learner.data.leases import order
from diloco_learner.data.shards import Cut, ShardReader, cut_of
from diloco_learner.models import from_named, to_named
from diloco_learner.models.transformer import SHAPES
from diloco_learner.training.evaluate import held_out_of
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.numerics.schedule import inner_rate
from diloco_shared.spec.run import RunSpec
from racing import job

WORKERS = 2
# Silence after which a member is gone, and the longest exchange, in seconds.
LEASE_S, PATIENCE_S = 5.0, 10.0
# Steps that our learners take while a run finishes, about.
ENDING = 10
# First steps whose losses torch and our code are compared on.
COMPARED = 24
# Of one step of one worker.
TOKENS = 8 * 64
# Rates that a run without an end is given: it is killed long before.
ENDLESS = 1000


def spec_of(args: argparse.Namespace, steps: int, *, settling: bool = False) -> dict[str, Any]:
    """Our run: the preset `long`, ended by the tokens that all workers are given together.

    Its outer step settles as the preset has it, or stays as it is throughout, as everybody's does.
    """
    factor = RunSpec.model_validate({"name": "x", "budget": {"steps": 1}}).algorithm
    constant = {} if settling else {"outer_settle_from": 1.0}
    return {
        "name": "peers",
        "model": {"preset": args.model},
        # Two cores for two learners and the hub: merges overlap with more steps.
        "algorithm": {"preset": "long", "fragments": 6, "quorum": 1, "overlap_steps": 8} | constant,
        "inner": {"learning_rate": args.rate / factor.inner_rate_factor},
        "membership": {"learners_min": WORKERS, "lease_s": LEASE_S},
        "evaluation": {"every_steps": 10**9, "sequences": 256},
        "keeping": {"checkpoint_every_steps": 10**9},
        # The last round of every fragment comes behind it.
        "budget": {"tokens": WORKERS * (steps - ENDING) * TOKENS},
    }


def write_job(folder: Path, args: argparse.Namespace, steps: int) -> None:
    """Our initial parameters, batches and rates, for those that cannot run our code."""
    planned = steps or 10**6
    spec = RunSpec.model_validate(spec_of(args, planned))
    a, inner = spec.algorithm, spec.inner
    cut = cut_of(
        load(spec.data).train, spec.data.virtual_shards, spec.model.context_tokens, spec.seed
    )
    taken = shards_of([f"learner-{n + 1}" for n in range(WORKERS)], cut.shards, spec.seed)
    settings = job.Settings(
        shape=tuple(astuple(SHAPES[args.model])[:7]),
        workers=WORKERS,
        steps=steps,
        sync_every=a.sync_every_steps,
        outer_rate=a.outer_rate,
        outer_momentum=a.outer_momentum,
        b1=inner.b1,
        b2=inner.b2,
        weight_decay=inner.weight_decay,
        clip_norm=inner.clip_norm,
        lease_s=LEASE_S,
        patience_s=PATIENCE_S,
        port=free_port(0),
    )
    known = range(steps or ENDLESS)
    rates = [inner_rate(inner, spec.inner_rate, n, n / planned) for n in known]
    initial = to_named(Program.build(spec).initial())
    batches = [batches_of(cut, shards, args.steps, inner.batch_sequences) for shards in taken]
    job.write(folder, settings, np.array(rates), initial, batches)


def shards_of(learners: Sequence[str], shards: int, seed: int) -> list[list[int]]:
    """Who leases which shards, in turn: everybody the next of its own order that is free."""
    orders = [order(shards, learner, seed) for learner in learners]
    taken: list[list[int]] = [[] for _ in learners]
    for turn in range(shards):
        held = {shard for mine in taken for shard in mine}
        free = [shard for shard in orders[turn % len(learners)] if shard not in held]
        taken[turn % len(learners)].append(free[0])
    return taken


def batches_of(cut: Cut, shards: list[int], steps: int, sequences: int) -> Any:
    """Shape (steps, B, L + 1): the shards one behind the other, as a learner reads them."""
    parts: list[Any] = []
    for shard in shards:
        if sum(map(len, parts)) >= steps * sequences:
            break
        parts.append(ShardReader(cut, shard).take(cut.size(shard)))
    whole = np.concatenate(parts)[: steps * sequences].astype(np.uint8)
    return whole.reshape(steps, sequences, -1)


def val_loss(parameters: Mapping[str, Any], args: argparse.Namespace) -> float:
    """By our code, on the sequences that our runs are evaluated on."""
    spec = RunSpec.model_validate(spec_of(args, args.steps))
    program = Program.build(spec)
    tokens = held_out_of(spec, load(spec.data).validation).sequences_SxL1
    return program.evaluate(from_named(program.initial(), parameters), tokens)


def difference(folder: Path, told: list[dict[str, Any]], args: argparse.Namespace) -> float:
    """Largest between a torch worker's first losses and those of our code on the same batches."""
    trainer = Trainer(Program.build(RunSpec.model_validate(spec_of(args, args.steps))))
    same, found = job.Job(folder), [line["loss"] for line in told if line["kind"] == "step"]
    mine = [float(trainer.step(same.batch(0, n), same.rate(n))) for n in range(COMPARED)]
    return float(max(abs(a - b) for a, b in zip(mine, found[:COMPARED], strict=True)))
