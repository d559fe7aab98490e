"""How long to wait for bytes: the same everywhere, from sizes and from progress.

What moves forward is not given up, however long it takes. What stands still is, once it has stood
still for longer than the slowest link worth using would explain. Pure numbers.
"""

from diloco_shared.protocol.chunks import CHUNK_BYTES

# The slowest link worth using for one payload, in bytes per second: 0.8 Mbit/s. A model of 1M
# parameters takes 40 s over it.
BYTES_PER_S_MIN = 100_000
# Silence that has other reasons than the link: a server that restarts, a connection that is made
# anew, a process that stands still for a garbage collection or a compilation.
PAUSE_S = 30.0
# Chunks of one payload under way side by side before the first of them lands: two on each of four
# connections, as `pace` begins.
_SIDE_BY_SIDE = 8


def transfer_s(size: int) -> float:
    """Seconds that `size` bytes take on the slowest link worth using."""
    return size / BYTES_PER_S_MIN


def inner_state_s(parameters: int) -> float:
    """Seconds that an inner state takes on that link: two fp32 moments per parameter."""
    return transfer_s(8 * parameters)


def silence_s(chunk_bytes: int = CHUNK_BYTES) -> float:
    """Seconds without one more chunk after which a transfer stands still."""
    return PAUSE_S + transfer_s(_SIDE_BY_SIDE * chunk_bytes)
