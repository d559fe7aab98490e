"""Which of the rare states thousands of seeds must reach, and which they may miss."""

from diloco_simulator.coverage import STATES
from diloco_simulator.options import UNMENDED

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
        "stopped by the user",
        "takeover during publication",
        "torn snapshot passed over",
        "two epochs raised",
        "two rounds skipped in a row",
    }
)
# Reached only by troubles that are known not to be survived (`options.UNMENDED`), by their names.
BEYOND = {
    "hub's disk full": "squeezes",
    "UP full": "squeezes",
    "DN full": "squeezes",
    "TAPE full": "squeezes",
    "tails lost": "tails",
    "learner hangs for minutes": "long_hangs",
    "learners lost for good": "losses",
    "syncers lost for good": "losses",
    "lacks learners": "losses",
    "lacks a syncer": "losses",
    "recreated: rename": "replaced",
    "recreated: empty": "replaced",
    "recreated: all at once": "replaced",
    "recreated: one by one": "replaced",
    "new names at work": "replaced",
}
# `make sim` fails where one of these was not reached.
REQUIRED = tuple(
    state for state in STATES if state not in RARE and BEYOND.get(state) not in UNMENDED
)
