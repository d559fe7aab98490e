"""Which beats count: those of the newest leader, in the order in which it sent them."""

from diloco_shared.protocol.messages import Beat


def is_final(beat: Beat) -> bool:
    """Nothing more is opened."""
    return beat.state in ("finished", "stopped")


def outdated(beat: Beat, known: Beat | None, *, fragments: int, deposed: bool) -> str:
    """Why a beat changes nothing beside the newest `known` one; or "".

    `deposed`: a newer leader than the one that sent it was heard of.
    """
    if len(beat.versions) != fragments:
        return "beat of another layout"
    if deposed:
        return "beat of a deposed leader"
    if known is None or (beat.epoch, beat.term) != (known.epoch, known.term):
        return ""
    # Core messages may overtake each other; a leader's versions only grow, and its end is final.
    overtaken = any(v < k for v, k in zip(beat.versions, known.versions, strict=True))
    if overtaken or (is_final(known) and not is_final(beat)):
        return "beat overtaken by a newer one"
    return ""
