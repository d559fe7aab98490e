"""What syncer and learners of a run put on its streams, message by message, at their worst.

Real manifests and records, real sizes and headers of chunks, on streams whose limits are exactly
the budget's: one byte more than that, and the broker refuses it as the server does.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from diloco_shared.budget.job import Job
from diloco_shared.budget.streams import SNAPSHOT_BYTES, SNAPSHOT_PARTS, streams
from diloco_shared.protocol import subjects
from diloco_shared.protocol.chunks import CHUNK_BYTES, HEADER_CHECK, HEADER_DIGEST, HEADER_INDEX
from diloco_shared.protocol.messages import (
    Blob,
    ContributionManifest,
    Cursor,
    InitManifest,
    LifeCount,
    Message,
    PublicationManifest,
    Stamp,
    StateManifest,
    TapeInit,
    TapeRound,
    TensorSpec,
    Verdict,
)
from diloco_shared.protocol.wire import encode
from diloco_shared.spec.codecs import bytes_of
from diloco_shared.spec.shapes import tensors
from diloco_simulator.hub.broker import MemoryBroker

DIGEST = "0123456789abcdef" * 2
LARGE = 10**9  # a counter after long training
CURSOR = Cursor(shard=60_000, sequences=LARGE, passes=9, finished=((59_999, 9),) * 16)
STAMP = Stamp(round=LARGE, steps=LARGE, fraction=0.5, fraction_per_step=1e-9)


@lru_cache(maxsize=64)
def _bytes(size: int) -> bytes:
    return bytes(size)


class Stored:
    """One run's streams. `worst` are the most bytes that each held."""

    def __init__(self, job: Job, *, name: str = "run", learner: str = "learner") -> None:
        self.job, self.run = job, name
        self.algorithm = job.spec.algorithm
        self.learners = [f"{learner}-{n}" for n in range(job.learners)]
        self.layout: tuple[TensorSpec, ...] = tensors(job.shape) if job.shape else ()
        self.broker = MemoryBroker(clock=lambda: 0.0)
        self.worst = dict.fromkeys(subjects.STREAM_KINDS, 0)
        needs, captured = streams(job), subjects.run_streams(name)
        for kind, need in needs.items():
            stream = subjects.run_stream(name, kind)
            config = {"name": stream, "subjects": [captured[stream]], "max_bytes": need.bytes}
            self.broker.ensure(config)
        self.manifests: dict[int, list[int]] = {}  # fragment -> sequences on DN

    # --- the hub -------------------------------------------------------------------------------

    def append(self, kind: str, subject: str, payload: bytes, **headers: str) -> int:
        """Store one message; StreamFull when the budget has no room for it."""
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        head = named | {"Nats-Msg-Id": named.get("Nats-Msg-Id", subject)}
        seq = self.broker.append(subject, payload, head, None, None)
        held = self.broker.info(subjects.run_stream(self.run, kind)).bytes
        self.worst[kind] = max(self.worst[kind], held)
        return seq

    def last(self, kind: str) -> int:
        """Sequence of the newest message."""
        return self.broker.info(subjects.run_stream(self.run, kind)).last_seq

    def blob(self, kind: str, subject: str, size: int) -> Blob:
        chunks = -(-size // CHUNK_BYTES)
        for index in range(chunks):
            part = _bytes(min(CHUNK_BYTES, size - index * CHUNK_BYTES))
            head = {
                HEADER_INDEX: str(index),
                HEADER_CHECK: DIGEST,
                HEADER_DIGEST: DIGEST,
                "Nats-Msg-Id": f"{subject}/{DIGEST}/{index}",
            }
            self.append(kind, subject, part, **head)
        return Blob(
            subject=subject, bytes=size, chunk_bytes=CHUNK_BYTES, chunks=chunks, digest=DIGEST
        )

    def manifest(self, kind: str, subject: str, message: Message) -> int:
        return self.append(kind, subject + ".m", encode(message))

    # --- UP ------------------------------------------------------------------------------------

    def initial(self, learner: str) -> None:
        for p, size in enumerate(self.job.sizes):
            subject = subjects.initial(self.run, learner, 1, p)
            blob = self.blob("UP", subject, bytes_of("fp32", size))
            self.manifest(
                "UP",
                subject,
                InitManifest(
                    run=self.run,
                    learner=learner,
                    incarnation=1,
                    config_hash=DIGEST,
                    layout=self.layout,
                    fragment=p,
                    blob=blob,
                ),
            )

    def pulled(self, number: int, term: int = 1) -> int:
        """Everybody's contributions to round `number` of every shard; the newest sequence."""
        seq = 0
        for shard in range(self.algorithm.shards):
            owned = self.algorithm.owned(shard)
            p = owned[number % len(owned)]
            for learner in self.learners:
                seq = self._contribution(learner, p, LARGE + number, term)
        return seq

    def _contribution(self, learner: str, p: int, number: int, term: int) -> int:
        subject, size = (
            subjects.contribution(self.run, learner, 1, p, number, term),
            self.job.sizes[p],
        )
        blob = self.blob("UP", subject, bytes_of(self.algorithm.codec_up, size))
        counts: dict[str, Any] = dict.fromkeys(("step_from", "step_to"), LARGE)
        counts |= dict.fromkeys(("tokens_from", "tokens_to"), 1000 * LARGE)
        m = ContributionManifest(
            run=self.run,
            learner=learner,
            incarnation=9,
            epoch=1,
            term=term,
            round=number,
            fragment=p,
            base=LARGE,
            cursor=CURSOR,
            codec=self.algorithm.codec_up,
            values=size,
            config_hash=DIGEST,
            checkpoint=9,
            blob=blob,
            **counts,
        )
        return self.manifest("UP", subject, m)

    def purge_up(self, below: int) -> None:
        self.broker.purge(subjects.up_stream(self.run), f"up.{self.run}.>", below)

    # --- DN ------------------------------------------------------------------------------------

    def publication(self, p: int, version: int, *, keyframe: str = "") -> int:
        subject = subjects.publication(self.run, 1, p, version, 9)
        codec = keyframe or self.algorithm.codec_down
        blob = self.blob("DN", subject, bytes_of(codec, self.job.sizes[p]))
        m = PublicationManifest(
            run=self.run,
            epoch=1,
            term=9,
            round=LARGE,
            fragment=p,
            version=version,
            prev_version=-1 if keyframe else version - 1,
            codec=codec,
            values=self.job.sizes[p],
            anchor_digest=DIGEST,
            config_hash=DIGEST,
            checkpoint=9,
            participants=tuple(self.learners),
            last_merged={name: (9, LARGE, LARGE) for name in self.learners},
            stamp=STAMP,
            layout=() if version else self.layout,
            blob=blob,
        )
        seq = self.manifest("DN", subject, m)
        self.manifests.setdefault(p, []).append(seq)
        return seq

    def purge_down(self, p: int) -> None:
        """All of a fragment before its newest keyframe."""
        before = self.manifests[p][-2] + 1
        self.broker.purge(subjects.dn_stream(self.run), f"dn.{self.run}.*.{p}.>", before)

    # --- TAPE, STATE ---------------------------------------------------------------------------

    def tape(self, rounds: int | None = None) -> None:
        """The whole run's, or so many rounds of every shard."""
        for shard in range(self.algorithm.shards):
            subject = subjects.tape(self.run, shard)
            self.append("TAPE", subject, encode(self._tape_init()))
            for number in range(self.job.rounds if rounds is None else rounds):
                self.append("TAPE", subject, encode(self._tape_round(number)))

    def _tape_init(self) -> TapeInit:
        fragments = range(self.algorithm.fragments)
        return TapeInit(
            run=self.run,
            config_hash=DIGEST,
            layout=self.layout,
            anchor_digests=(DIGEST,) * len(fragments),
            subjects=tuple(subjects.initial(self.run, self.learners[0], 9, p) for p in fragments),
            learner=self.learners[0],
            incarnation=9,
            at=1.7e9,
        )

    def _tape_round(self, number: int) -> TapeRound:
        p = number % self.algorithm.fragments
        return TapeRound(
            epoch=1,
            term=9,
            round=LARGE + number,
            fragment=p,
            outcome="committed",
            reason="",
            quorum_reason=f"{len(self.learners)} of {len(self.learners)} ready, 1 needed",
            quorum=1,
            version=LARGE,
            verdicts=tuple(self._verdicts(p, LARGE + number)),
            keyframe=False,
            outer_fraction=0.5,
            anchor_digest=DIGEST,
            master_digest=DIGEST,
            payload_digest=DIGEST,
            stamp=STAMP,
            quorum_s=1.5,
            grace_s=1.5,
            sync_s=1.5,
            at=1.7e9,
            counts=tuple(
                LifeCount(learner=x, incarnation=9, tokens=10**12, adopted=((p, 10**12),) * 2)
                for x in self.learners
            ),
        )

    def _verdicts(self, p: int, number: int) -> Iterator[Verdict]:
        for learner in self.learners:
            yield Verdict(
                learner=learner,
                incarnation=9,
                outcome="merged",
                reason="",
                subject=subjects.contribution(self.run, learner, 1, p, number, 9),
                digest=DIGEST,
                base=LARGE,
                step_from=LARGE,
                step_to=LARGE,
                tokens_from=10**12,
                tokens_to=10**12,
                weight=1.5e9,
                norm=1.5,
                tokens_new=LARGE,
                cursor=Cursor(shard=60_000, sequences=LARGE, passes=9),
            )

    def donations(self, count: int) -> None:
        for n in range(count):
            subject = subjects.state(self.run, self.learners[0], self.learners[-1], f"nonce-{n}")
            blob = self.blob("STATE", subject, self.job.state)
            self.manifest(
                "STATE",
                subject,
                StateManifest(
                    run=self.run,
                    donor=self.learners[0],
                    donor_incarnation=9,
                    newcomer=self.learners[-1],
                    newcomer_incarnation=9,
                    nonce=f"nonce-{n}",
                    epoch=9,
                    versions=(LARGE,) * self.algorithm.fragments,
                    donor_step=LARGE,
                    config_hash=DIGEST,
                    blob=blob,
                ),
            )

    def snapshot_parts(self) -> None:
        largest = max(self.job.sizes)
        for part in range(SNAPSHOT_PARTS * self.algorithm.shards):
            self.blob("STATE", f"state.{self.run}.syncer.standby.{part}", SNAPSHOT_BYTES * largest)
