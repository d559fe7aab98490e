"""What any bytes must keep to that a server may send; a fuzzer and a plain test give the bytes.

The same bytes, whole and in pieces, must give the same events or the same fault, and nothing but
events, waiting for more or a WireFault may come of any bytes.
"""

from diloco_shared.bus.nats.wire import Arrived, Event, Parser, WireFault


def plain(event: Event) -> object:
    """Comparable: a payload by its content, and what is read from headers later."""
    if not isinstance(event, Arrived):
        return event
    return event.message, event.message.status, bytes(event.payload)


def parse(data: bytes, sizes: bytes) -> tuple[list[object], bool]:
    """Events, and whether it ended in a fault; rooms are filled by the sizes in turn."""
    parser, events, at, turn = Parser(lambda _: None), [], 0, 0
    while at < len(data):
        limit = 1 + sizes[turn % len(sizes)] if sizes else len(data)
        taken, turn = 0, turn + 1
        for room in parser.room():
            part = data[at : at + min(len(room), limit - taken)]
            room[: len(part)] = part
            at, taken = at + len(part), taken + len(part)
        try:
            events += [plain(event) for event in parser.took(taken)]
        except WireFault:
            return events, True
    return events, False


def one(data: bytes) -> None:
    """The first bytes say how the rest comes in pieces."""
    cut = data[0] % 8 if data else 0
    sizes, stream = data[1 : 1 + cut], data[1 + cut :]
    whole, whole_failed = parse(stream, b"")
    pieces, pieces_failed = parse(stream, sizes)
    assert whole_failed == pieces_failed, "a fault depends on how the bytes came"
    # What came before a fault is dropped with the rest of its read.
    shorter = min(len(whole), len(pieces))
    assert whole[:shorter] == pieces[:shorter], "the meaning depends on how the bytes came"
    assert whole_failed or len(whole) == len(pieces)
