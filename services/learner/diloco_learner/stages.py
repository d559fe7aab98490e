"""The states of a recovery, and which may follow which."""

from enum import Enum


class State(Enum):
    """Where a recovery stands."""

    JOINING = "joining"  # no grant yet
    BOOTSTRAPPING = "bootstrapping"  # granted, and nothing is published yet
    RECEIVING = "receiving"  # waiting for a donor's inner state
    ANCHORING = "anchoring"  # inner state is settled; waiting for anchors
    BEGUN = "begun"
    LEFT = "left"


# What may follow what; anything else is a fault in `recovery`.
MOVES: dict[State, frozenset[State]] = {
    State.JOINING: frozenset({State.BOOTSTRAPPING, State.RECEIVING, State.ANCHORING, State.LEFT}),
    State.BOOTSTRAPPING: frozenset({State.BEGUN, State.LEFT}),
    State.RECEIVING: frozenset({State.JOINING, State.ANCHORING, State.LEFT}),
    State.ANCHORING: frozenset({State.BEGUN, State.LEFT}),
    State.BEGUN: frozenset(),
    State.LEFT: frozenset(),
}
