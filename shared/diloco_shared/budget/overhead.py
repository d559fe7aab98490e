"""What messages add to the bytes they carry, as the server stores them.

Measured with nats-server 2.12: a stream's size over the payload's. Names are counted at their
longest (63 characters each for run and learner), since a budget is a bound.
"""

from diloco_shared.protocol.chunks import CHUNK_BYTES
from diloco_shared.protocol.messages import TensorSpec
from diloco_shared.protocol.wire import MESSAGE_BYTES_MAX as WIRE_BYTES_MAX
from diloco_shared.spec.codecs import bytes_of

# A chunk: measured 210 bytes of headers, checks and framing, and its subject twice (once in the
# message id), which has at most 240 characters. Short names make it 256: 0.05 % of a chunk.
CHUNK_EXTRA = 704
# A manifest's message: measured 61 bytes, and its subject twice.
MESSAGE_EXTRA = 560
# Manifests as `wire.encode` makes them, with the longest names and numbers of ten digits; a cursor
# may name 16 finished shards.
CONTRIBUTION, PUBLICATION, INITIAL, STATE = 900, 800, 600, 900
# Of a fragment in the manifest of an inner state: the version adopted.
STATE_FRAGMENT = 10
# Of a learner in a publication's manifest: among the participants, and when it was last merged.
PUBLICATION_LEARNER = 150
# Of a tensor in a layout, beside its name: shape, keys and framing.
TENSOR = 40
# Of a fragment in the tape's record of initial parameters: a digest, and its subject.
INIT_FRAGMENT = 290
# A tape record of a round: 498 + 348 M bytes with short names, 790 + 620 M with the longest, and
# its message. `counts` names each fragment that a learner adopted since.
ROUND, ROUND_LEARNER = 1200, 640
# Largest message. The wire takes 1 MiB without subject and headers; so much with them is what a
# hub takes that was set up as docs/how-to/deploy.md says (one that `diloco up` starts takes 2 MiB).
MESSAGE_BYTES_MAX = WIRE_BYTES_MAX - MESSAGE_EXTRA


def chunks(payload: int) -> int:
    return -(-payload // CHUNK_BYTES)


def stored(payload: int, manifest: int) -> int:
    """Bytes in a stream of a payload in chunks, and of the manifest behind them."""
    return payload + chunks(payload) * CHUNK_EXTRA + manifest + MESSAGE_EXTRA


def contribution(codec: str, values: int) -> int:
    """Bytes in UP of one learner's contribution of a fragment."""
    return stored(bytes_of(codec, values), CONTRIBUTION)


def publication(codec: str, values: int, learners: int, layout: int = 0) -> int:
    """Bytes in DN of one version of a fragment."""
    manifest = PUBLICATION + PUBLICATION_LEARNER * learners + layout
    return stored(bytes_of(codec, values), manifest)


def initial(values: int, layout: int) -> int:
    """Bytes in UP of the initial parameters of a fragment."""
    return stored(bytes_of("fp32", values), INITIAL + layout)


def inner_state(size: int, fragments: int) -> int:
    """Bytes in STATE of a donor's moments and counts."""
    return stored(size, STATE + STATE_FRAGMENT * fragments)


def layout_bytes(tensors: tuple[TensorSpec, ...]) -> int:
    """Of all tensors in a message that carries the layout."""
    return sum(len(t.name) + TENSOR for t in tensors)


def largest_with_layout(layout: int, fragments: int, learners: int) -> int:
    """Bytes of the largest message that carries the layout: the tape's record of the initial
    parameters, or a keyframe that all learners had a part in."""
    return layout + max(
        INITIAL + INIT_FRAGMENT * fragments, PUBLICATION + PUBLICATION_LEARNER * learners
    )
