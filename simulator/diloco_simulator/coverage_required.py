"""Which of the rare states thousands of seeds must reach, and which they may miss."""

from diloco_simulator.coverage import STATES

# Of those, the ones that even thousands of seeds may miss: a test or a place to die plays most.
RARE = frozenset(
    {
        "a syncer's clock stood still",
        "append of unknown outcome that was not on the tape",
        "checkpoint not written",
        "delta of an epoch to come",
        "epoch of a shard that is over",
        "initializer dies",
        "join refused: superseded",
        "join refused: the run is over",
        "leader dies before a Write of the lease",
        "leader dies before any init",
        "learner left behind at the end",
        "moments of a checkpoint",
        "moments of somebody else's part",
        "part not written",
        "recovery whose donor died",
        "refused: outlier",
        "refused: second",
        "refused: stale",
        "restart during publication",
        "restore executed by a standby",
        "restore failed",
        "restored twice",
        "restored while a checkpoint is made",
        "restored with a round in flight",
        "shards in two epochs",
        "standby dies before a snapshot",
        "state lost at the hub and on disks",
        "stopped by the user",
        "takeover during publication",
        "torn snapshot passed over",
        "two epochs raised",
        "two rounds skipped in a row",
    }
)
# `make sim` fails where one of these was not reached.
REQUIRED = tuple(state for state in STATES if state not in RARE)
