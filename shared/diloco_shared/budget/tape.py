"""How many records a tape holds in its stream: archiving and the stream's limit go by it."""

# Records of a shard that lie in the stream before any of them is archived: a day of the
# coordinator's pages and of standbys' reading comes from the stream, a restart reads seconds of it.
RECORDS_IN_STREAM = 2048
# Snapshots on a syncer's disk, whose records may not go yet: two are kept, and one is written.
SNAPSHOTS = 3


def records_max(snapshot_every_rounds: int) -> int:
    """Records of a shard in its stream at the worst moment, for the stream's limit.

    Those that may lie there, those that no kept snapshot covers, and as many again while standbys
    are waited for: a round has one record, and there are fewer others than rounds.
    """
    return 2 * (RECORDS_IN_STREAM + 2 * SNAPSHOTS * snapshot_every_rounds)
