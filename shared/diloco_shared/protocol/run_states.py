"""States of a run: which mean its end, and which one speaks for all where shards differ."""

from diloco_shared.protocol.messages import RunState

OVER: tuple[RunState, ...] = ("finished", "stopped")
# While shards differ, the run is said to be what comes first here. One that has no parameters yet
# is why another waits for steps.
SHOWN_FIRST: tuple[RunState, ...] = (
    "bootstrapping",
    "waiting",
    "paused",
    "full",
    "starved",
    "stuck",
    "finishing",
)
