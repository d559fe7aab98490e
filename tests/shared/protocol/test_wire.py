"""Messages on the wire: what was sent comes back, and one changed byte is found."""

import hashlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from next_release import speaking
from pydantic import ValidationError
from syncer.recording import Recording

from diloco_shared.protocol.messages import Join, RecoveryTimes
from diloco_shared.protocol.records import Fault
from diloco_shared.protocol.wire import (
    MESSAGE_BYTES_MAX,
    NAMED_BYTES,
    SEAL_BYTES,
    WireError,
    decode,
    decode_tape,
    encode,
    name_of,
)


def records() -> tuple[Any, ...]:
    """A first term, the initial parameters, a committed round."""
    recording = Recording()
    recording.begin()
    recording.round()
    return tuple(recording.tape)


RECORDS = records()


def sealed(packed: bytes) -> bytes:
    return packed + hashlib.blake2b(packed, digest_size=SEAL_BYTES).digest()


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_comes_back_as_it_was(record: Any) -> None:
    assert decode_tape(encode(record)) == record
    assert decode(encode(record), type(record)) == record
    assert decode_tape(bytearray(encode(record))) == record


@pytest.mark.parametrize("record", RECORDS)
def test_the_name_of_a_record_is_read_without_the_rest(record: Any) -> None:
    data = encode(record)
    assert name_of(data) == name_of(data[:NAMED_BYTES]) == type(record).__name__
    assert name_of(data[:9]) == name_of(b"") == name_of(b"\x93\x01\x02\x03") == ""


@pytest.mark.parametrize("record", RECORDS)
def test_what_a_later_release_adds_is_passed_over(record: Any) -> None:
    with speaking():
        data = encode(record)
    assert data != encode(record)
    assert decode_tape(data) == decode(data, type(record)) == record


def test_nobody_makes_a_message_with_an_unknown_field() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        Fault(id="f", kind="kill", target="t", wish=1)  # type: ignore[call-arg]


@given(
    st.sampled_from([encode(r) for r in RECORDS]).flatmap(
        lambda data: st.tuples(st.just(data), st.integers(0, len(data) - 1), st.integers(1, 255))
    )
)
def test_one_changed_byte_anywhere_is_found(case: tuple[bytes, int, int]) -> None:
    data, place, flip = case
    changed = bytearray(data)
    changed[place] ^= flip
    with pytest.raises(WireError, match="damaged"):
        decode_tape(bytes(changed))


@given(st.sampled_from([encode(r) for r in RECORDS]), st.integers(0, 400))
def test_what_is_cut_short_is_found(data: bytes, kept: int) -> None:
    with pytest.raises(WireError):
        decode_tape(data[: min(kept, len(data) - 1)])


@given(st.binary(max_size=200))
def test_anything_else_is_refused(data: bytes) -> None:
    for kind in (data, sealed(data)):
        with pytest.raises(WireError):
            decode_tape(kind)


@pytest.mark.parametrize(
    ("envelope", "said"),
    [
        ({"v": 2, "t": "Fault"}, "not an envelope"),
        ({"v": 1, "t": "Fault", "b": {}}, "wire version 1, this side speaks 2: finish or stop"),
        ({"v": 2, "t": "Nobody", "b": {}}, "unknown message type 'Nobody'"),
        ({"v": 2, "t": "TapeTerm", "b": {}}, "expected Fault, got TapeTerm"),
        ({"v": 2, "t": "Fault", "b": {"id": "f", "kind": "kill"}}, "Fault.target: Field required"),
    ],
)
def test_a_whole_message_that_is_wrong_says_what_is(envelope: Any, said: str) -> None:
    with pytest.raises(WireError, match=said):
        decode(sealed(msgpack.packb(envelope)), Fault)


@pytest.mark.parametrize("field", ["donor", "source"])
def test_no_learner_tells_a_text_that_fills_the_status_of_its_run(field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        RecoveryTimes.model_validate({"age_s": 1.0, field: "x" * 129})


def test_no_nonce_is_larger_than_those_that_are_remembered_may_be() -> None:
    with pytest.raises(ValidationError, match="nonce"):
        Join(learner="a", incarnation=0, nonce="x" * 129, config={})


def test_a_message_has_a_largest_size() -> None:
    with pytest.raises(WireError, match="exceeds the wire limit"):
        decode_tape(bytes(MESSAGE_BYTES_MAX + 1))
