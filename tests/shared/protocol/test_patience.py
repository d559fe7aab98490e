"""Waiting follows from sizes, and from the slowest link worth using."""

from diloco_shared.protocol.pace import BYTES_PER_S_MIN, PAUSE_S, silence_s, transfer_s


def test_a_transfer_is_given_what_it_takes_on_the_slowest_link() -> None:
    assert transfer_s(0) == 0.0
    assert transfer_s(60 * BYTES_PER_S_MIN) == 60.0


def test_silence_is_that_of_a_chunk_whatever_the_payload() -> None:
    assert silence_s(0) == PAUSE_S
    assert silence_s() - PAUSE_S >= 4 * transfer_s(512 * 1024)
    assert silence_s(2 << 20) > silence_s(1 << 20)
