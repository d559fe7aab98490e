"""Loops that take steps, and nothing else: our own step, and plain JAX without any of our code.

Both read the same batches, and begin with the same parameters. As the learner's loop does, each
reads the loss of a step while the next one runs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray

from diloco_learner.data.corpus import load
from diloco_learner.data.shards import cut_of
from diloco_learner.models import places, to_named
from diloco_learner.training.data_parallel import LearnerStream
from diloco_learner.training.evaluate import HeldOut
from diloco_learner.training.trainer import Program, Trainer
from diloco_shared.spec.run import RunSpec
from diloco_shared.spec.shapes import Shape, shape_of

# Batches that the loops go through, again and again: none is still in a cache when its turn comes.
BATCHES = 32

Step = Callable[[NDArray[np.int32]], jax.Array]


def batches(spec: RunSpec) -> NDArray[np.int32]:
    """Of the corpus that the learner trains on: shape (BATCHES, B, L + 1)."""
    corpus = load(spec.data)
    cut = cut_of(corpus.train, spec.data.virtual_shards, spec.model.context_tokens, spec.seed)
    stream: Any = LearnerStream(cut, 0, 1)
    return np.stack([stream.take(spec.inner.batch_sequences) for _ in range(BATCHES)])


def prepare(spec: RunSpec, folder: Path) -> None:
    """Leave what every loop begins with: `tokens.npy`, and one `<name>.npy` for each tensor."""
    np.save(folder / "tokens.npy", batches(spec))
    trainer = Trainer(Program.build(spec))
    named = to_named(trainer.params)
    for name, place in places(named, trainer.program.model.stacked).items():
        values = named[place.leaf] if place.layer is None else named[place.leaf][place.layer]
        np.save(folder / f"{name.replace('/', '.')}.npy", np.asarray(values))


def tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    """What `prepare` left, by name."""
    found = sorted(folder.glob("*.npy"))
    return {f.stem.replace(".", "/"): np.load(f) for f in found if f.stem != "tokens"}


def ours(spec: RunSpec) -> Step:
    """The compiled step of the product, with nothing around it; compiled at the first call."""
    program = Program.build(spec)
    trainer = Trainer(program)
    state: list[Any] = [trainer.params, trainer.opt_state]
    rate = np.float32(spec.inner_rate)

    def step(tokens_BxL1: NDArray[np.int32]) -> jax.Array:
        state[0], state[1], loss = program.step(state[0], state[1], tokens_BxL1, rate)
        return jnp.asarray(loss)

    return step


# --------------------------------------------------------------------------------------------------
# Plain JAX: what somebody writes who wants this one model to be fast, and needs nothing else. Every
# layer has tensors of its own, layers follow one another in the program, all logits are made at
# once, optax is used as it comes, and the state is donated.


def _norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    power = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(power + epsilon) * scale).astype(x.dtype)


def _turned(x_BxLxHxK: jax.Array, base: float) -> jax.Array:
    """Rotary positions: the first and the second half of a head are the pairs."""
    length, half = x_BxLxHxK.shape[1], x_BxLxHxK.shape[3] // 2
    speed = base ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(length, dtype=jnp.float32)[:, None] * speed
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = jnp.split(x_BxLxHxK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_BxLxHxK.dtype)


def plain_loss(
    shape: Shape, dtype: Any, params: dict[str, jax.Array], tokens_BxL1: jax.Array
) -> jax.Array:
    """Mean nats per token of the dense shape without windows, biases and caps."""
    inputs, targets = tokens_BxL1[:, :-1], tokens_BxL1[:, 1:]
    batch, length = inputs.shape
    embedding = params["embedding/tokens_VxD"]
    x = embedding[inputs].astype(dtype)
    if shape.embed_scale:
        x = x * jnp.asarray(shape.width**0.5, dtype)
    fused: Any = "cudnn" if jax.default_backend() == "gpu" and dtype == jnp.bfloat16 else None
    for n in range(shape.layers):
        p = {
            name.split("/", 1)[1]: value.astype(dtype)
            for name, value in params.items()
            if name.startswith(f"layer_{n:02}/")
        }
        h = _norm(x, p["attention/norm_D"], shape.norm_epsilon)
        q = (h @ p["attention/query_DxHK"]).reshape(batch, length, shape.heads, shape.head_width)
        k = (h @ p["attention/key_DxGK"]).reshape(batch, length, shape.kv_heads, shape.head_width)
        v = (h @ p["attention/value_DxGK"]).reshape(batch, length, shape.kv_heads, shape.head_width)
        mixed = jax.nn.dot_product_attention(
            _turned(q, shape.rope_base),
            _turned(k, shape.rope_base),
            v,
            is_causal=True,
            implementation=fused,
        )
        x = x + mixed.reshape(batch, length, -1) @ p["attention/out_HKxD"]
        h = _norm(x, p["mlp/norm_D"], shape.norm_epsilon)
        x = x + (jax.nn.silu(h @ p["mlp/gate_DxF"]) * (h @ p["mlp/up_DxF"])) @ p["mlp/down_FxD"]
    x = _norm(x, params["final_norm/scale_D"], shape.norm_epsilon)
    head = embedding.T if shape.tied else params["output/head_DxV"]
    logits = (x @ head.astype(dtype)).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, targets))


def plain(spec: RunSpec, folder: Path) -> Step:
    """A loop's step from the parameters in `folder`; compiled when it is called first."""
    shape, inner = shape_of(spec.model), spec.inner
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    params = {name: jnp.asarray(values) for name, values in tensors(folder).items()}
    optimizer = optax.chain(
        optax.clip_by_global_norm(inner.clip_norm),
        optax.adamw(
            spec.inner_rate,
            b1=inner.b1,
            b2=inner.b2,
            weight_decay=inner.weight_decay,
            mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
        ),
    )
    state: list[Any] = [params, optimizer.init(params)]

    def update(params: Any, opt_state: Any, tokens_BxL1: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(
            lambda p: plain_loss(shape, dtype, p, tokens_BxL1),
        )(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def step(tokens_BxL1: NDArray[np.int32]) -> jax.Array:
        state[0], state[1], loss = compiled(state[0], state[1], tokens_BxL1)
        return jnp.asarray(loss)

    return step


# --------------------------------------------------------------------------------------------------
# What is part of the method: work of a learner on its own core beside its steps.


def fragment_work_s(
    spec: RunSpec, now: Callable[[], float], repeats: int = 3
) -> tuple[float, float]:
    """(seconds for every fragment to be contributed and adopted once, seconds of an evaluation).

    The least of the repeats: what the work takes without anybody else. Sending is not part of it.
    """
    program = Program.build(spec)
    trainer = Trainer(program)
    trainer.warm_up(spec.inner.batch_sequences)
    every = range(len(program.layout.fragments))
    anchors = [trainer.fragment(p).copy() for p in every]
    held_out = HeldOut(np.zeros((spec.held_out_sequences, spec.model.context_tokens + 1), np.int32))
    jax.block_until_ready(trainer.params)
    moved, evaluated = [], []
    for _ in range(repeats + 1):  # the first one warms up
        began = now()
        for p in every:
            trainer.adopt(p, anchors[p], spec.algorithm.alpha)
            trainer.contribution(p, 0).fetch()
        jax.block_until_ready(trainer.params)
        moved.append(now() - began)
        began = now()
        trainer.evaluate(trainer.published(), held_out)
        evaluated.append(now() - began)
    return min(moved[1:]), min(evaluated[1:])


def compile_s(spec: RunSpec, now: Callable[[], float]) -> float:
    """Seconds until the step is compiled, tracing included; nothing is computed."""
    program = Program.build(spec)
    tokens = (spec.inner.batch_sequences, spec.model.context_tokens + 1)
    state = jax.eval_shape(program.init_state, program.shapes)
    began = now()
    program.step.compile(
        program.shapes, state, jax.ShapeDtypeStruct(tokens, np.int32), np.float32(0)
    )
    return now() - began
