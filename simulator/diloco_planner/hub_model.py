"""What a syncer and a message server cost, by laws that were measured: docs/results/scale.json.

Processor seconds of one core of the machine that file names; bench/scale.py measures them on
yours. Bytes are of one way; GB are 1e9 bytes.
"""

GB = 1e9
# A round's gate and merge, per contributed value; outer step and publication, per value of the
# fragment. By codec; one that was not measured is taken for the dearest.
GATED_VALUE_S = {
    "fp32": 6.94e-10,
    "bf16": 5.26e-10,
    "int8": 5.08e-10,
    "int4": 4.30e-10,
    "e3m0": 5.65e-10,
}
MERGED_VALUE_S = {
    "fp32": 4.67e-10,
    "bf16": 2.08e-10,
    "int8": 1.92e-10,
    "int4": 1.81e-10,
    "e3m0": 3.77e-10,
}
STEPPED_VALUE_S = {
    "fp32": 5.10e-9,
    "bf16": 4.28e-9,
    "int8": 5.16e-9,
    "int4": 4.15e-9,
    "e3m0": 4.74e-9,
}
# Decisions, by one thread: the reports of a step, and the pull, answers and record of a round.
REPORT_S = 6.05e-5  # a learner
REPORT_FRAGMENT_S = 1.65e-6  # a learner and fragment
REPORT_PAIR_S = 3.33e-7  # a pair of learners: some answers depend on everybody
DECISION_S = 1.10e-4  # a learner
DECISION_PAIR_S = 9.75e-7  # a pair of learners
# The message server and its clients, per byte.
STORED_S = 1.64 / GB
GIVEN_S = 0.859 / GB
FETCHED_S = 0.574 / GB
# Most that learners were seen to put at once, server and learners sharing two cores
# (docs/results/transport.json: 4 learners, fragments of 64 MiB).
STORED_GB_PER_S = 1.17
# Memory: master, anchor, the anchor before and momentum in 4 bytes each; and of a round in flight
# the three that follow and a payload of two bytes.
STATE_BYTES, STAGE_BYTES = 16, 14


def merge_s(learners: int, values: float, codec: str) -> float:
    """Of a round: gate, merge, outer step and publication of a fragment of `values`."""
    gated, merged, stepped = (
        costs.get(codec, max(costs.values()))
        for costs in (GATED_VALUE_S, MERGED_VALUE_S, STEPPED_VALUE_S)
    )
    return values * (learners * (gated + merged) + stepped)


def report_s(learners: int, fragments: int) -> float:
    """Of a step: what the learners report, heard and weighed."""
    return learners * (REPORT_S + REPORT_FRAGMENT_S * fragments + REPORT_PAIR_S * learners)


def decision_s(learners: int) -> float:
    """Of a round: pull, contributions' manifests, verdicts and record."""
    return learners * (DECISION_S + DECISION_PAIR_S * learners)


def moved_s(bytes_moved: float) -> float:
    """Of a syncer, to fetch or to publish so many bytes."""
    return FETCHED_S * bytes_moved


def server_s(stored: float, given: float) -> float:
    """Of the message server, to store and to give out so many bytes."""
    return STORED_S * stored + GIVEN_S * given


def memory_bytes(
    params: float, values: float, learners: int, bytes_per_value: float, in_flight: int
) -> float:
    """Of a syncer: state, and in every round in flight the contributions and what follows."""
    round_bytes = values * (learners * bytes_per_value + STAGE_BYTES)
    return STATE_BYTES * params + in_flight * round_bytes
