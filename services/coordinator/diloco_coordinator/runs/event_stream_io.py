"""The stream that keeps events: how large it is, and how much of it one learner may take."""

from dataclasses import replace

from diloco_coordinator.runs.events import (
    BY_ONE_MAX,
    EVENT_BYTES_MAX,
    EVENTS_BYTES_MAX,
    NAMED_BYTES_MAX,
)
from diloco_shared.bus.port import StreamSpec
from diloco_shared.protocol import subjects


def events_stream(*, named: bool) -> StreamSpec:
    """Of events; `named`: every process has credentials of its own."""
    name, captured = subjects.EVENTS_STREAM, (subjects.EVENTS_FILTER,)
    whole = StreamSpec(name, captured, EVENTS_BYTES_MAX, drop_oldest=True)
    if not named:
        return whole
    return replace(
        whole,
        synced=False,  # a flood would keep the disk busy that the tape is written to
        bytes_max=NAMED_BYTES_MAX,
        subject_messages_max=BY_ONE_MAX,
        message_bytes_max=EVENT_BYTES_MAX,
    )
