"""What is wrong with a run wherever it runs: known at submission, and refused there.

Only that: what a learner's disk or device lacks is for the learner to say.
"""

import re
from collections.abc import Iterator

from diloco_shared.budget.job import Job, assumed
from diloco_shared.budget.overhead import MESSAGE_BYTES_MAX, largest_with_layout
from diloco_shared.budget.streams import streams
from diloco_shared.budget.terms import shown
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import COUNT_MAX
from diloco_shared.spec.algorithm import MEMBERS_MAX
from diloco_shared.spec.faults import SpecFault, did_you_mean
from diloco_shared.spec.run import OF_RUN, Model, RunSpec
from diloco_shared.spec.shapes import TOKENS, WrongModel

# An encoded fragment counts its values in 32 bits.
FRAGMENT_MAX = 2**32 - 1
# Data shards of a new run: sixteen for each of as many learners as it takes, more than any of them
# can hold. A learner that seeks one reads all leases and all places of the run, 380 bytes for each
# shard: 3 MB, or 2.5 s at 10 Mbit/s. Of 65,536 they are 25 MB, longer than such a shard lasts.
DATA_SHARDS_MAX = 16 * MEMBERS_MAX
ROOT_SCHEMES = ("file", "gs", "s3")


def faults(spec: RunSpec) -> list[SpecFault]:
    """Every fault that can be known; none for a run that can begin."""
    found = [*_named(spec), *_model(spec), *_data(spec), *_counts(spec)]
    if found:
        return found
    try:
        return list(_sizes(assumed(spec)))
    except WrongModel as error:
        return [SpecFault(error.path, error.text)]


def _named(spec: RunSpec) -> Iterator[SpecFault]:
    """Not of RunSpec itself: a record of an older release, with such a name, must be readable."""
    if spec.name in subjects.NO_RUNS:
        text = (
            f"{spec.name!r} is kept for the project's own messages, and what is done to such a run "
            "would be done to them: choose another name"
        )
        yield SpecFault("name", text)


def _model(spec: RunSpec) -> Iterator[SpecFault]:
    model, tokenizer = spec.model, spec.data.tokenizer
    if model.factory is not None:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", model.factory):
            text = (
                f"{model.factory[:60]!r} must read module:factory, such as 'my_models.small:make'"
            )
            yield SpecFault("model.factory", text)
        if model.weights and not model.checkpoint:
            text = (
                "names a folder, which is for presets: a model of your own reads its weights in "
                "init(), or begins from a run-wide checkpoint (checkpoint:FOLDER/NUMBER)"
            )
            yield SpecFault("model.weights", text)
        yield from _beginning(model)
        return
    yield from _beginning(model)
    try:
        shape = assumed(spec).shape
    except WrongModel as error:
        yield SpecFault(error.path, error.text)
        return
    assert shape is not None
    if shape.vocabulary < TOKENS.get(tokenizer, 0):
        text = (
            f"({shape.vocabulary}) is too small for data.tokenizer {tokenizer!r}, which makes "
            f"{TOKENS[tokenizer]} different tokens"
        )
        yield SpecFault("model.overrides.vocabulary", text)
    if model.parameters not in (None, (n := assumed(spec).parameters)):
        text = f"({model.parameters}) is for a factory: preset {model.preset!r} has {n}"
        yield SpecFault("model.parameters", text)


def _beginning(model: Model) -> Iterator[SpecFault]:
    """Whether it is said for good what the run begins from."""
    if model.weights.startswith(OF_RUN):
        text = (
            "names a run, of which 'diloco submit' makes a folder: submit the file so, or export "
            "the run (diloco export NAME --to FOLDER) and name the folder"
        )
        yield SpecFault("model.weights", text)
    elif model.weights and not model.weights_digest:
        text = (
            "is missing: the coordinator fills it in when the run is submitted, if it reaches the "
            "checkpoint"
            if model.checkpoint
            else "is missing: 'diloco model describe FOLDER' prints the digest of the weights in a "
            "folder, and 'diloco submit' fills it in where model.weights is on its machine"
        )
        yield SpecFault("model.weights_digest", text)
    elif model.weights_digest and not model.weights:
        yield SpecFault("model.weights", "is missing, and model.weights_digest is not")


def _data(spec: RunSpec) -> Iterator[SpecFault]:
    data, root = spec.data, spec.keeping.run_checkpoint_root
    # Not of RunSpec itself: a run of an earlier release that has more must be readable.
    if data.virtual_shards > DATA_SHARDS_MAX:
        text = f"a new run has {DATA_SHARDS_MAX} data shards at most, not {data.virtual_shards}"
        yield SpecFault("data.virtual_shards", text)
    if scheme := _scheme(data.tokenizer):
        text = f"is an address ({scheme}://): copy the file to a folder that every learner has"
        yield SpecFault("data.tokenizer", text)
    elif data.tokenizer not in TOKENS and not _is_path(data.tokenizer):
        known = ", ".join(repr(name) for name in TOKENS)
        text = (
            f"{data.tokenizer[:40]!r} is neither {known} nor a path: write ./{data.tokenizer[:40]} "
            f"for a file or folder of that name{did_you_mean(data.tokenizer, TOKENS)}"
        )
        yield SpecFault("data.tokenizer", text)
    for number, part in enumerate(data.sources):
        path = f"data.mixture.{number}.source" if data.mixture else "data.source"
        if not part.source.strip() or "\0" in part.source:
            text = "is empty: 'stdlib', or a folder or file of text that every learner has"
            yield SpecFault(path, text)
        elif scheme := _scheme(part.source):
            text = f"is an address ({scheme}://): copy the text to a folder that every learner has"
            yield SpecFault(path, text)
    if (scheme := _scheme(root)) and scheme not in ROOT_SCHEMES:
        text = f"begins with {scheme}://: a folder, or one of file://, gs://, s3://"
        yield SpecFault("keeping.run_checkpoint_root", text)


def _is_path(name: str) -> bool:
    """Whether it can only be meant as a path: a bare word is a name that is not known."""
    return ("/" in name or "." in name) and "\0" not in name


def _scheme(address: str) -> str:
    found = re.match(r"([A-Za-z][\w+.-]*)://", address)
    return found[1] if found else ""


def _counts(spec: RunSpec) -> Iterator[SpecFault]:
    wanted = {
        "algorithm.quorum": spec.algorithm.quorum,
        "membership.learners_min": spec.membership.learners_min,
        "membership.learners_max": spec.membership.learners_max,
    }
    for path, learners in wanted.items():
        if learners > MEMBERS_MAX:
            yield SpecFault(path, f"a run takes {MEMBERS_MAX} learners at most, not {learners}")
    steps = spec.budget.steps
    if steps is None:
        return
    every = spec.tokens_per_step * spec.membership.learners_max
    if steps * every > COUNT_MAX:
        text = (
            f"({steps}) times {every} tokens a step of membership.learners_max learners is more "
            f"than can be counted ({COUNT_MAX}): at most {COUNT_MAX // every}"
        )
        yield SpecFault("budget.steps", text)


def _sizes(job: Job) -> Iterator[SpecFault]:
    algorithm = job.spec.algorithm
    if job.largest > FRAGMENT_MAX:
        text = (
            f"({algorithm.fragments}) leaves {job.largest} values in a fragment, of which there "
            f"may be {FRAGMENT_MAX}: at least {-(-2 * job.parameters // FRAGMENT_MAX)}"
        )
        yield SpecFault("algorithm.fragments", text)
    learners = job.spec.membership.learners_max
    message = largest_with_layout(job.layout, algorithm.fragments, learners)
    # A model of one's own is looked at where it is built: how many tensors it has, nobody knows.
    if job.shape is not None and message > MESSAGE_BYTES_MAX:
        text = (
            f"make a message of {message} bytes with all tensors' names, and one holds "
            f"{MESSAGE_BYTES_MAX}: fewer layers"
        )
        yield SpecFault("model.overrides.layers", text)
    bound = job.spec.keeping.stream_bytes_max
    needs = streams(job)
    worst = max(needs.values(), key=lambda need: need.bytes)
    if bound is not None and worst.bytes > bound:
        each = ", ".join(f"{kind} {need.bytes}" for kind, need in needs.items())
        text = (
            f"({bound}) is too small: {worst.what} needs {worst.bytes} bytes ({shown(worst.bytes)})"
            f" with {job.learners} learners; set it to at least that, leave it out, or change "
            f"{worst.lower}. In bytes: {each}"
        )
        yield SpecFault("keeping.stream_bytes_max", text)
