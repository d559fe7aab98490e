"""The planner's constants are those of the laws that were measured; and what follows from them."""

import json
from pathlib import Path
from typing import Any

import pytest

from diloco_planner import hub_model as h

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


LAWS: dict[str, Any] = recorded("scale.json")["laws"]


def of(law: str, term: str) -> float:
    return float(LAWS[law]["terms"][term])


@pytest.mark.parametrize("codec", sorted(h.MERGED_VALUE_S))
def test_a_merge_costs_what_was_measured(codec: str) -> None:
    for known, law, term in (
        (h.GATED_VALUE_S, f"gate_s_{codec}", "per_contributed_value"),
        (h.MERGED_VALUE_S, f"stage_s_{codec}", "per_contributed_value"),
        (h.STEPPED_VALUE_S, f"stage_s_{codec}", "per_value"),
    ):
        assert known[codec] == pytest.approx(of(law, term), rel=0.01)


def test_decisions_and_bytes_cost_what_was_measured() -> None:
    for known, law, term in (
        (h.REPORT_S, "step_s", "per_learner"),
        (h.REPORT_FRAGMENT_S, "step_s", "per_learner_and_fragment"),
        (h.REPORT_PAIR_S, "step_s", "per_pair_of_learners"),
        (h.DECISION_S, "round_s", "per_learner"),
        (h.DECISION_PAIR_S, "round_s", "per_pair_of_learners"),
        (h.STORED_S * h.GB, "server_stores_s", "per_gb"),
        (h.GIVEN_S * h.GB, "server_gives_s", "per_gb"),
        (h.FETCHED_S * h.GB, "syncer_fetches_s", "per_gb"),
    ):
        assert known == pytest.approx(of(law, term), rel=0.01), law


def test_the_message_server_was_seen_to_store_so_much() -> None:
    rows = recorded("transport.json")["rounds"]
    most = max(rows, key=lambda name: rows[name]["up_gb_per_s"])
    assert (most, rows[most]["fragment_mib"]) == ("4 learners", 64), "as the comment says"
    known = h.STORED_GB_PER_S
    assert known == pytest.approx(rows[most]["up_gb_per_s"], abs=0.005)


def test_cost_grows_with_learners_and_values_and_memory_is_shared_among_rounds() -> None:
    assert h.merge_s(8, 2e6, "bf16") == pytest.approx(2 * h.merge_s(8, 1e6, "bf16"))
    assert h.merge_s(9, 1e6, "bf16") > h.merge_s(8, 1e6, "bf16")
    assert h.decision_s(64) > 8 * h.decision_s(8)
    assert h.memory_bytes(1e9, 1e9 / 24, 8, 2, 2) == pytest.approx(16e9 + 2 * 30e9 / 24)
