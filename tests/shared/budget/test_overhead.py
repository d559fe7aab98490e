"""That messages which carry all tensors' names are within what is said of them, and not far."""

import pytest

from diloco_shared.budget.overhead import largest_with_layout, layout_bytes
from diloco_shared.protocol import subjects
from diloco_shared.protocol.messages import (
    Blob,
    Message,
    PublicationManifest,
    Stamp,
    TapeInit,
    TensorSpec,
)
from diloco_shared.protocol.wire import encode

LONG, DIGEST, MANY = "r" * 63, "a" * 32, 10**9
NAMED = tuple(
    TensorSpec(name=f"layers/{n}/attention/query_DxHK", shape=(8192, 8192), embedding=False)
    for n in range(100, 500)
)


def record(fragments: int) -> TapeInit:
    subject = subjects.initial(LONG, LONG, MANY, fragments)
    return TapeInit(
        run=LONG,
        config_hash=DIGEST,
        layout=NAMED,
        anchor_digests=(DIGEST,) * fragments,
        subjects=(subject,) * fragments,
        learner=LONG,
        incarnation=MANY,
        at=1.7e9,
    )


def keyframe(learners: int) -> PublicationManifest:
    names = tuple(f"{n:063}" for n in range(learners))
    subject = subjects.publication(LONG, MANY, MANY, MANY, MANY)
    return PublicationManifest(
        run=LONG,
        epoch=MANY,
        term=MANY,
        round=MANY,
        fragment=MANY,
        version=MANY,
        prev_version=-1,
        codec="fp32",
        values=MANY,
        anchor_digest=DIGEST,
        config_hash=DIGEST,
        participants=names,
        last_merged={name: (MANY, MANY, MANY) for name in names},
        stamp=Stamp(round=MANY, steps=MANY, fraction=0.1, fraction_per_step=0.1),
        layout=NAMED,
        blob=Blob(subject=subject, bytes=MANY, chunk_bytes=MANY, chunks=MANY, digest=DIGEST),
    )


@pytest.mark.parametrize(
    ("message", "fragments", "learners"),
    [(record(512), 512, 1), (record(1), 1, 1), (keyframe(512), 1, 512), (keyframe(1), 1, 1)],
)
def test_a_message_with_the_layout_is_as_large_as_is_said(
    message: Message, fragments: int, learners: int
) -> None:
    said = largest_with_layout(layout_bytes(NAMED), fragments, learners)
    assert 0.6 * said < len(encode(message)) <= said
