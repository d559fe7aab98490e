"""Re-execution (I9): the same tape and contributions, the same bits; anything else is named."""

import json
from typing import Any

import numpy as np
import pytest
from syncer.recording import SPEC, Recording

from diloco_shared.numerics import codec
from diloco_shared.protocol.messages import TapeEnd, TapeRecord
from diloco_shared.spec.run import RunSpec
from diloco_syncer.history.history import History, TapeFault
from diloco_syncer.history.replay import payloads_needed, replay
from diloco_syncer.merging.store import FragmentStore


@pytest.fixture
def recording() -> Recording:
    recorded = Recording()
    recorded.begin()
    for n in range(10):
        recorded.round(skipped=n == 4)
    recorded.append(TapeEnd(term=1, outcome="stopped", reason="asked", versions=(5, 4), at=99.0))
    return recorded


def play(
    tape: list[TapeRecord],
    payloads: dict[str, bytes],
    history: History,
    store: FragmentStore | None = None,
) -> FragmentStore | None:
    """Replay what follows `history`, each record with no more than the payloads it asks for."""
    for seq, record in enumerate(tape, 1):
        if seq > history.seq:
            needed = {s: payloads[s] for s in payloads_needed(record)}
            store = replay(history, store, record, seq, needed)
    return store


def state(store: FragmentStore | None) -> dict[str, bytes]:
    assert store is not None
    return {name: array.tobytes() for name, array in store.state_arrays().items()}


def test_a_replayed_tape_gives_the_same_bits_i9(recording: Recording) -> None:
    history = History(SPEC)
    store = play(recording.tape, recording.payloads, history)
    assert state(store) == state(recording.store)
    assert history.meta() == recording.history.meta()
    assert history.committed == 9 and history.outcome == "stopped"


@pytest.mark.parametrize("rule", ["mean", "clipped", "trimmed", "median"])
def test_every_merge_is_replayed_to_the_bit_i9(rule: str) -> None:
    spec = RunSpec.model_validate(
        SPEC.model_dump() | {"algorithm": SPEC.algorithm.model_dump() | {"merge": rule}}
    )
    recorded = Recording(history=History(spec))
    recorded.begin()
    for _ in range(4):
        recorded.round()
    again = play(recorded.tape, recorded.payloads, History(spec))
    assert state(again) == state(recorded.store)
    other = Recording()
    other.begin()
    for _ in range(4):
        other.round()
    assert state(other.store) != state(again), "the rule decided something"


@pytest.mark.parametrize("covered", [2, 5, 9, 13])
def test_a_replay_from_any_snapshot_gives_the_same_bits_i9(
    recording: Recording, covered: int
) -> None:
    history = History(SPEC)
    store = play(recording.tape[:covered], recording.payloads, history)
    assert store is not None
    history = History.restore(SPEC, json.loads(json.dumps(history.meta())))
    store = FragmentStore.restore(
        json.loads(json.dumps(store.meta())), store.state_arrays(), SPEC.algorithm
    )
    store = play(recording.tape, recording.payloads, history, store)
    assert state(store) == state(recording.store)
    assert history.meta() == recording.history.meta()


def test_a_changed_contribution_is_reported_with_its_record(recording: Recording) -> None:
    subject = "up.t.b.0.1.3.1"
    values = codec.decode("bf16", recording.payloads[subject], 6)
    payloads = {**recording.payloads, subject: codec.encode("bf16", -values)}
    with pytest.raises(TapeFault, match="record 6: digest of the master of round 3, fragment 1"):
        play(recording.tape, payloads, History(SPEC))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"anchor_digest": "0" * 32}, "record 6: digest of the anchor of round 3"),
        ({"payload_digest": "0" * 32}, "record 6: digest of the publication of round 3"),
        ({"keyframe": True}, "record 6: digest of the anchor of round 3"),
        ({"fragment": 0}, "record 6"),
    ],
)
def test_a_changed_record_is_reported(
    recording: Recording, change: dict[str, Any], words: str
) -> None:
    tape = [*recording.tape]
    tape[5] = tape[5].model_copy(update=change)
    with pytest.raises(TapeFault, match=words):
        play(tape, recording.payloads, History(SPEC))


def test_changed_initial_parameters_are_reported(recording: Recording) -> None:
    payloads = {
        **recording.payloads,
        "up.t.a.init.0.1": codec.encode("fp32", np.zeros(6, np.float32)),
    }
    with pytest.raises(TapeFault, match="record 2: digest of the version 0 of fragment 1"):
        play(recording.tape, payloads, History(SPEC))


@pytest.mark.parametrize("payload", [None, b"torn"])
def test_a_missing_or_torn_contribution_is_reported_with_its_record(
    recording: Recording, payload: bytes | None
) -> None:
    history = History(SPEC)
    store = play(recording.tape[:5], recording.payloads, history)
    assert store is not None
    before, versions = state(store), list(history.versions)
    payloads = {} if payload is None else dict.fromkeys(recording.payloads, payload)
    with pytest.raises(TapeFault, match="record 6 cannot be executed again"):
        replay(history, store, recording.tape[5], 6, payloads)
    assert (state(store), history.versions, history.seq) == (before, versions, 5)


def test_a_round_before_any_parameters_is_reported(recording: Recording) -> None:
    with pytest.raises(TapeFault, match="record 1 commits a round before any init record"):
        replay(History(SPEC), None, recording.tape[2], 1, recording.payloads)


def test_only_what_is_merged_is_needed_again(recording: Recording) -> None:
    assert payloads_needed(recording.tape[0]) == ()
    assert payloads_needed(recording.tape[1]) == ("up.t.a.init.0.0", "up.t.a.init.0.1")
    assert payloads_needed(recording.tape[2]) == tuple(f"up.t.{m}.0.0.0.1" for m in "abc")
    assert payloads_needed(recording.tape[6]) == ()  # the skipped round
    assert payloads_needed(recording.tape[-1]) == ()
