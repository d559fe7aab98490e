"""Memory and disk of each process of a run, by what is in it.

Host memory means anonymous memory: what a process itself needs. Mapped files come on top where
there is room, and go where there is none. On a learner without an accelerator the device's memory
is the host's: both figures add up.
"""

import math

from diloco_shared.budget.job import Job
from diloco_shared.budget.overhead import ROUND, ROUND_LEARNER
from diloco_shared.budget.streams import FLOOR, RECORDS_IN_STREAM, SNAPSHOTS, TAPE_SAFETY, limits
from diloco_shared.budget.terms import Need, Term, shown
from diloco_shared.spec.codecs import bytes_of, facts
from diloco_shared.spec.mesh import MeshSizes
from diloco_shared.spec.optimizers import outer_state_bytes
from diloco_shared.spec.shapes import Shape, fusable, layer_tensors

MB = 1_000_000
# Measured with a model of 0.1M parameters: Python and its libraries, compiled loops, buffers.
SYNCER_BASE, COORDINATOR_BASE = 170 * MB, 60 * MB
# And JAX with the programs of a small model, without its arrays: of the learner that evaluates,
# whose compiler works beside its steps. One that does not evaluate takes 430 MB.
LEARNER_BASE = 680 * MB
# What nats-server is told to stay below (GOMEMLIMIT, `nats_server.py`); more is taken if needed.
HUB_BASE = 384 * 1024 * 1024
# Headers of fragments, and what comes of small models. (Of a model of one's own only the number of
# values is known: two fragments more than a shard's share are granted too.)
PAYLOADS_LEAST = 256 * 1024 * 1024
# Chunks on their way over one bus: 32 MiB each way at most.
WINDOW = 64 * 1024 * 1024
# Logits that a learner makes at a time, in fp32: as many as a matrix product needs to be fast, and
# little beside a model with a vocabulary for which it matters.
LOGITS_BYTES = 64 << 20
# Sequences, and tokens, of one call of an evaluation, whichever is less. A training step's batch is
# evaluated at once in any case.
SEQUENCES_MAX, TOKENS_MAX = 64, 4096
# Of an activation: a CPU multiplies in fp32, accelerators in bf16.
WIDTH, WIDTH_ON_CPU = 2, 4
# Of a pair of tokens in the mask that keeps documents apart, for cuDNN: whether they are of one,
# the bias that says so in two bytes, and that bias's gradient.
MASK_BYTES = 5
# Of what a device orthogonalises at a time: as it came, moved, worked on and moved back.
ORTHOGONALISED = 4
ONE_DEVICE = MeshSizes()
# The coordinator's mirror of events, histories and members: a few thousand of a kilobyte.
MIRROR = 40 * MB


def processes(job: Job, mesh: MeshSizes = ONE_DEVICE, hosts: int = 1) -> dict[str, Need]:
    """Host memory of each process, and the memory of each device of a learner.

    `hosts`: of which each learner consists; `mesh`: of the devices of all of them.
    """
    others = {"learner, other hosts": other_host(job, hosts)} if hosts > 1 else {}
    return {
        "syncer": syncer(job),
        "learner": learner(job, hosts),
        **others,
        "learner device": device(job, mesh=mesh),
        "coordinator": Need(
            "coordinator",
            (
                Term("process", COORDINATOR_BASE, "Python and its libraries, measured"),
                Term("mirror", MIRROR, "events, histories and members, whatever the model"),
            ),
        ),
        "hub": Need("hub", (Term("nats-server", HUB_BASE, "its soft limit, whatever the model"),)),
    }


def _of_a_shard(job: Job) -> int:
    """Values of the largest shard."""
    algorithm = job.spec.algorithm
    shards = range(algorithm.shards)
    return max(sum(job.sizes[p] for p in algorithm.owned(shard)) for shard in shards)


def syncer(job: Job) -> Need:
    """Of one syncer; a standby needs as much, since it executes every round."""
    a, values = job.spec.algorithm, _of_a_shard(job)
    outer = outer_state_bytes(a.outer_optimizer, a.outer_momentum)
    flying, largest = a.rounds_in_flight_max, job.largest
    payload = bytes_of(a.codec_up, largest)
    per_value = 8 + outer
    return Need(
        "syncer",
        (
            Term("process", SYNCER_BASE, "Python, its libraries and compiled loops, measured"),
            Term(
                "fragments",
                int(per_value * values),
                f"{per_value:g} bytes x N of a shard: master, anchor and outer state",
            ),
            Term(
                "contributions",
                flying * job.learners * payload,
                f"{flying} rounds in flight x {job.learners} learners x a fragment in {a.codec_up}",
            ),
            Term(
                "outcomes",
                flying * int((per_value + 4) * largest),
                f"{flying} rounds in flight x {per_value:g} + 4 bytes x the largest fragment: what "
                "a merge makes, and the payload published",
            ),
            Term(
                "a snapshot",
                2 * int(per_value * largest),
                f"2 x {per_value:g} bytes x the largest fragment: what rounds replace before it is "
                "written, and while it is",
            ),
            Term(
                "a checkpoint",
                4 * largest,
                "4 bytes x the largest fragment: an array on its way to where run-wide checkpoints "
                "are",
            ),
            Term("transfers", WINDOW, "chunks on their way"),
        ),
        "algorithm.shards, algorithm.codec_up, or more fragments",
    )


def payloads(job: Job) -> int:
    """Most bytes of others that a syncer holds at once, before a round or the start needs them.

    The initial parameters of a shard, which become its arrays, or the contributions of the rounds
    in flight twice over: those of a round that was given up may still be on their way.
    """
    a = job.spec.algorithm
    contributions = a.rounds_in_flight_max * job.learners * bytes_of(a.codec_up, job.largest)
    initial = bytes_of("fp32", _of_a_shard(job) + 2 * job.largest)
    return max(initial, 2 * contributions) + PAYLOADS_LEAST


def learner(job: Job, hosts: int = 1) -> Need:
    """Host memory of one learner beside its devices; of several hosts, that of process 0."""
    each, what = 8, "a keyframe as it came and its values"
    if hosts > 1:
        # The other hosts' parts of what it adds to are put together then.
        each, what = 16, "a delta as it came, its values, and what it adds to, in parts and whole"
    return Need(
        "learner",
        (
            Term("process", LEARNER_BASE, "Python, JAX and compiled programs, measured"),
            _anchors(job, hosts),
            Term(
                "held-out text",
                4 * job.spec.held_out_sequences * (job.spec.model.context_tokens + 1),
                "4 bytes x the tokens of an evaluation",
            ),
            Term(
                "a transfer",
                max(each * job.largest, job.state),
                f"moments and counts ({job.spec.inner.optimizer}) on their way, or {each} bytes x "
                f"the largest fragment: {what}",
            ),
            Term("transfers", WINDOW, "chunks on their way"),
        ),
        "inner.optimizer with less state, or more fragments",
    )


def other_host(job: Job, hosts: int) -> Need:
    """Host memory of each process of a learner but process 0, beside its devices."""
    return Need(
        "learner, other hosts",
        (
            Term("process", LEARNER_BASE, "as of process 0"),
            _anchors(job, hosts),
            Term(
                "a transfer",
                -(-max(4 * job.largest, job.state) // hosts),
                "its part of moments and counts on their way, or of an anchor",
            ),
            Term("transfers", WINDOW, "chunks on their way"),
        ),
        "inner.optimizer with less state, or more hosts",
    )


def _anchors(job: Job, hosts: int) -> Term:
    if hosts == 1:
        return Term("anchors", 4 * job.parameters, "4 bytes x N: what was adopted last")
    # While the hosts compile an island's first evaluation, what it is of is held beside what is
    # adopted meanwhile.
    sets = 2 if job.spec.evaluation.beside_training else 1
    twice = " and, for a first evaluation, before" if sets > 1 else ""
    each = f"{4 * sets} bytes x N / {hosts} hosts: its part of what was adopted last{twice}"
    return Term("anchors", -(-4 * sets * job.parameters // hosts), each)


def device(
    job: Job, *, on_cpu: bool = False, kernel: bool = True, mesh: MeshSizes = ONE_DEVICE
) -> Need:
    """Memory of each device of a learner; what a compiler adds is not known before it compiles.

    `kernel`: it has cuDNN's attention, as NVIDIA's cards have since 2020.
    """
    width, context = WIDTH_ON_CPU if on_cpu else WIDTH, job.spec.model.context_tokens
    # With documents apart that kernel takes a mask of context x context, and even contexts alone.
    apart = job.spec.data.documents == "apart"
    fused = kernel and not on_cpu and job.shape is not None and fusable(job.shape)
    fused = fused and not (apart and context % 2)
    mask = MASK_BYTES * context * context if fused and apart else 0
    n, inner, a = job.parameters, job.spec.inner, job.spec.algorithm
    gradients = 4 * n * (2 if inner.accumulation > 1 else 1)
    cut = mesh.state_parts
    of = f" / {cut} devices" if cut > 1 else ""
    terms = [
        Term("parameters", -(-4 * n // cut), f"4 bytes x N{of}"),
        Term(
            "optimizer state", -(-job.state // cut), f"moments and counts of {inner.optimizer}{of}"
        ),
        Term(
            "gradients", -(-gradients // cut), f"4 bytes x N, twice where they are accumulated{of}"
        ),
        fragment_work(job, mesh),
    ]
    if a.error_feedback and facts(a.codec_up).scaled:
        flying, every = a.rounds_in_flight_max, mesh.devices
        of = f", / {every} devices" if every > 1 else ""
        terms.append(
            Term(
                "what was withheld",
                -(-(4 * n + 8 * job.largest * flying) // every),
                f"4 bytes x N, and 8 x the largest fragment for {flying} rounds in flight: "
                f"algorithm.error_feedback{of}",
            )
        )
    lower = "inner.batch_sequences, or a model with remat"
    terms += _of_others(job, width, mesh)
    if job.shape is not None:
        sequences = -(-inner.batch_sequences // mesh.batch_parts)
        size = activations(job.shape, sequences, context, width, fused=fused) + sequences * mask
        how = f"an estimate: batch x context x widths, of {width} bytes each"
        if fused:
            how += ", with cuDNN's attention"
        if mesh.batch_parts > 1:
            how += f"; {sequences} of the sequences on each device"
        terms.append(Term("activations", size, how if on_cpu else f"{how} (4 on a CPU)"))
    if job.spec.evaluation.beside_training:
        # Otherwise it is made between two steps, in the memory of gradients and activations.
        terms.append(_evaluation(job, width, mesh, fused, mask))
        lower += ", or evaluation.beside_training = false"
    return Need("learner device", tuple(terms), lower)


def _of_others(job: Job, width: int, mesh: MeshSizes) -> list[Term]:
    """What each device has for a moment of what the others keep."""
    inner, terms = job.spec.inner, list[Term]()
    if job.shape is None:
        return terms
    if mesh.fsdp * mesh.expert > 1:
        tokens = inner.batch_sequences * job.spec.model.context_tokens // mesh.data
        terms.append(
            Term(
                "gathered",
                gathered(job.shape, tokens, width, mesh),
                "an estimate: the output matrix and its gradient, or one layer's matrices, while "
                "they are computed with",
            )
        )
    if inner.optimizer == "muon" and mesh.state_parts > 1:
        terms.append(
            Term(
                "orthogonalised",
                orthogonalised(job.shape, mesh),
                f"{ORTHOGONALISED} x what a device has of the largest matrix of all layers while "
                "Muon works on it (measured: 1.7 to 3.7)",
            )
        )
    return terms


def fragment_work(job: Job, mesh: MeshSizes) -> Term:
    """What a fragment takes of each device while it is read, encoded or adopted."""
    name, how = "one fragment's work", "x the largest fragment: anchor, difference and its encoding"
    if mesh.devices == 1:
        return Term(name, 12 * job.largest, f"12 bytes {how}")
    own = -(-12 * job.largest // mesh.devices)
    whole = "5 bytes x the largest fragment, which is whole for a moment (measured: 4 to 4.4)"
    return Term(
        name, 5 * job.largest + own, f"{whole}; and 12 bytes {how}, / {mesh.devices} devices"
    )


def tokens_go_around(tokens: int, vocabulary: int) -> bool:
    """Whether devices hand so many tokens of a batch around, and not the output matrix.

    `tokens`: those of all devices that share a state. To send them and their gradients, of D values
    each, then costs no more than to send the matrix (D, V) and its gradient.
    """
    return tokens <= vocabulary


def gathered(shape: Shape, tokens: int, width: int = WIDTH, mesh: MeshSizes = ONE_DEVICE) -> int:
    """Bytes of what a device of the axis fsdp has for a moment of what the others keep.

    `tokens`: of a step, of all devices that share a state. Of experts a device has only its own,
    where they lie on the axis `expert`.

    The output matrix in the type of activations and its gradient in fp32, whole, or its share of
    them, twice, where tokens go around; or the matrices of a layer, two at a time, and their
    gradients.
    """
    sizes = layer_tensors(shape).values()
    layer = sum(math.prod(d) // (mesh.expert if len(d) == 3 else 1) for d in sizes)
    head = (width + 4) * shape.vocabulary * shape.width
    if tokens_go_around(tokens, shape.vocabulary):
        head = -(-2 * head * mesh.tensor // mesh.state_parts)
    return max(head, 2 * 4 * layer) // mesh.tensor


def orthogonalised(shape: Shape, mesh: MeshSizes) -> int:
    """Bytes that a device has for a moment of Muon's work (the learner's `training.muon`).

    The matrices of some layers whole, and of the output, where it is no embedding, some columns,
    with products of as many rows.
    """
    largest = 0
    for dims in layer_tensors(shape).values():
        if len(dims) > 1:
            experts = mesh.expert if len(dims) == 3 else 1
            layers = -(-shape.layers // (mesh.state_parts // experts))
            largest = max(largest, layers * (math.prod(dims) // experts))
    found = 4 * ORTHOGONALISED * largest
    if not shape.tied:
        short, long = sorted((shape.width, shape.vocabulary))
        own = short * long // (1 if long % mesh.state_parts else mesh.state_parts)
        found = max(found, 4 * (ORTHOGONALISED * own + 3 * short * short))
    return found


def _taken(shape: Shape, context: int) -> float:
    """Places in MLPs for each token: one, or those that experts have room for."""
    return shape.experts * shape.room(context) / context if shape.experts else 1.0


def _evaluation(job: Job, width: int, mesh: MeshSizes, fused: bool, mask: int) -> Term:
    """What an evaluation beside a step takes of each device."""
    size = -(-4 * job.parameters // mesh.state_parts)
    how = "4 bytes x N: the published parameters, evaluated beside a step"
    if mesh.state_parts > 1:
        how = how.replace("N:", f"N / {mesh.state_parts} devices:")
    if job.shape is not None:
        context = job.spec.model.context_tokens
        at_once = evaluated_at_once(context, job.spec.inner.batch_sequences)
        own = -(-at_once // mesh.batch_parts)
        size += forward(job.shape, own, context, width, fused=fused) + own * mask
        of = "1 sequence" if own == 1 else f"{own} sequences"
        how += f"; and one layer's activations of {of}"
    return Term("evaluation", size, how)


def evaluated_at_once(context: int, trained: int) -> int:
    """Sequences per call of an evaluation, where steps take `trained` of `context` tokens each.

    Bounds the memory of activations and logits, however long sequences are. A training step's
    batch may always be taken: its step needs more than that.
    """
    return max(trained, min(SEQUENCES_MAX, TOKENS_MAX // context), 1)


def activations(
    shape: Shape, batch: int, context: int, width: int = WIDTH, *, fused: bool = False
) -> int:
    """An estimate of what the backward pass keeps, in bytes, with activations of `width` bytes.

    Per token of a layer: two inputs, queries, keys, values and their mixture, and two hidden
    values; of experts, where they have room, also what goes in and what comes out; the attention's
    weights (context x context a head, in fp32 and in the type of activations), or where attention
    is `fused` a sum for each head. Norms and gates are computed again. Where a layer is computed
    again, every layer's input and one layer's rest, norms and gates too; where only products are
    kept, they and one layer's rest. For one layer at a time what its backward pass makes: gradients
    of hidden values, and of attention's weights and logits, or of queries in fp32. Of logits and
    their gradient, in fp32, what is made at a time, and the gradient of what the head sees.
    """
    s, tokens = shape, batch * context
    products, layer = _layer(shape, batch, context, width, fused)
    match s.remat:
        case "layer":
            layers = (
                s.layers * width * tokens * s.width + layer + _made_again(s, tokens, context, width)
            )
        case "products":
            layers = s.layers * products + layer
        case _:
            layers = s.layers * layer
    hidden = int(width * tokens * s.hidden * _taken(s, context))
    each = s.head_width if fused else 2 * context
    layers += 2 * hidden + 4 * tokens * s.heads * each
    return layers + 2 * _logits(shape, tokens) + width * tokens * s.width


def forward(
    shape: Shape, batch: int, context: int, width: int = WIDTH, *, fused: bool = False
) -> int:
    """Bytes of the activations of a loss alone, roughly: all that one layer makes, and the logits
    that are made at a time, or else what comes in and goes out."""
    s, tokens = shape, batch * context
    layer = _layer(shape, batch, context, width, fused)[1]
    layer += _made_again(s, tokens, context, width)
    if not fused:  # and attention's logits: nothing keeps them longer
        layer += 4 * batch * s.heads * context * context
    return max(layer, _logits(shape, tokens)) + 2 * width * tokens * s.width


def _made_again(shape: Shape, tokens: int, context: int, width: int) -> int:
    """Bytes of a layer's norms and of what its gates let through."""
    return int(tokens * width * (2 * shape.width + shape.hidden * _taken(shape, context)))


def _layer(shape: Shape, batch: int, context: int, width: int, fused: bool) -> tuple[int, int]:
    """Bytes of a layer's products, and of all its activations."""
    s, tokens = shape, batch * context
    query, key = s.heads * s.head_width, s.kv_heads * s.head_width
    places = _taken(s, context)
    hidden = 2 * s.hidden * places
    # What is normed once it is multiplied is kept as the product.
    inputs = 3 * s.width if s.post_norms else 2 * s.width
    products = inputs + query + 2 * key + (0 if s.experts else hidden)
    normed = (query + key if s.qk_norm else 0) + (s.width if s.post_norms else 0)
    layer = products + query + normed
    # Products of experts are one for each of them, which are computed again where some are kept.
    layer += hidden + s.width + 2 * s.width * places if s.experts else 0.0
    # Capped logits are kept, and what their slope is made of.
    weights = 4 + (width if width < 4 else 0) + (8 if s.attention_cap else 0)
    kept = 4 * tokens * s.heads if fused else weights * tokens * s.heads * context
    return int(tokens * width * products), int(tokens * width * layer) + kept


def _logits(shape: Shape, tokens: int) -> int:
    return min(4 * tokens * shape.vocabulary, LOGITS_BYTES + 4 * shape.vocabulary)


def kept_bytes(job: Job) -> float:
    """Bytes of a value in a snapshot: master, anchor, the anchor before, and outer state."""
    a = job.spec.algorithm
    return 12 + outer_state_bytes(a.outer_optimizer, a.outer_momentum)


def written_per_round(values: float, kept: float, owned: int, every: int) -> float:
    """Bytes that a syncer puts on its disk for each round of its shard, on average.

    Every round puts the anchor that it replaces there. Every snapshot, of `every` rounds, writes
    what they have changed since the one before: `kept` bytes a value. `values`: of each of the
    `owned` fragments.
    """
    changed = min(every, owned) / every  # of a fragment, for each round
    return (4 + kept * changed) * values


def snapshots_per_step(job: Job) -> float:
    """Bytes that a syncer, leading or not, puts on its disk in an inner step, on average."""
    a, every = job.spec.algorithm, job.spec.keeping.snapshot_every_rounds
    owned = a.fragments // a.shards
    each = _of_a_shard(job) / owned  # values of a fragment
    return written_per_round(each, kept_bytes(job), owned, every) / a.steps_per_round


def disks(job: Job) -> dict[str, Need]:
    """Disk of hub, syncer, learner and coordinator, and where run-wide checkpoints are."""
    keeping, values, per_value = job.spec.keeping, _of_a_shard(job), kept_bytes(job)
    floor = min(FLOOR, keeping.stream_bytes_max or FLOOR)
    how = f"limit of the stream: what it needs, and {shown(floor)} at least"
    return {
        "hub": Need("hub", tuple(Term(k, size, how) for k, size in limits(job).items())),
        "syncer": Need(
            "syncer",
            (
                Term(
                    "snapshots",
                    SNAPSHOTS * int(per_value * values),
                    f"{SNAPSHOTS} x {per_value:g} bytes x N of a shard: two kept, one being "
                    "written",
                ),
                Term("anchors before", 4 * values, "4 bytes x N of a shard: one version back"),
                Term(
                    "a checkpoint gone back to",
                    int(per_value * values),
                    f"{per_value:g} bytes x N of a shard: until rounds have replaced it, for there "
                    "is no second place for it in memory",
                ),
            ),
        ),
        "learner": Need(
            "learner",
            (
                Term(
                    "checkpoints",
                    (keeping.checkpoints + 1) * job.state,
                    f"{keeping.checkpoints + 1} x moments and counts: keeping.checkpoints, and one "
                    "being written",
                ),
            ),
            "keeping.checkpoints",
        ),
        "coordinator": _exports(job),
        "checkpoints": _checkpoints(job),
    }


def _checkpoints(job: Job) -> Need:
    """Run-wide checkpoints, as many as are kept at most, and the tape."""
    per_value, shards = kept_bytes(job), job.spec.algorithm.shards
    kept = job.spec.keeping.run_checkpoints
    how = (
        f"{kept + 1} x ({per_value:g} bytes x N, and moments and counts of {job.learners} "
        "learners): keeping.run_checkpoints, and one being written; what other runs need stays, too"
    )
    each = int(per_value * job.parameters) + job.learners * job.state
    terms = [Term("run-wide checkpoints", (kept + 1) * each, how)]
    record = ROUND + ROUND_LEARNER * job.learners
    if (count := shards * (TAPE_SAFETY * job.rounds - RECORDS_IN_STREAM)) > 0:
        how = (
            f"{count} records of {record} bytes before they are compressed: of every shard the "
            f"rounds of the run twice, but for {RECORDS_IN_STREAM} that lie in the stream"
        )
        terms.append(Term("archived tape", count * record, how))
    return Need("checkpoints", tuple(terms), "keeping.run_checkpoints")


def _exports(job: Job) -> Need:
    """What the coordinator keeps of the run's weights, and makes of them at a time, as fp32.

    The oldest goes after the newest is made, so that all that are kept lie there beside that one.
    """
    keeping, whole = job.spec.keeping, 4 * job.parameters
    terms = []
    if keeping.export_every_rounds is not None:
        how = f"{keeping.exports} x 4 bytes x N: keeping.exports, which the run makes by itself"
        terms.append(Term("exports", keeping.exports * whole, how))
    how = "8 bytes x N: the values that are read, and its files; one asked for takes 4 after that"
    return Need(
        "coordinator",
        (*terms, Term("an export being made", 2 * whole, how)),
        "keeping.exports",
    )
