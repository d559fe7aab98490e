"""Learners that come and go for good leave nothing behind but totals (I5, I12)."""

import churn
import pytest

from diloco_syncer.members import roster


def test_what_is_remembered_follows_from_who_is_there_not_from_who_ever_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hundreds of ids in minutes of virtual time, with gaps that shrink in proportion."""
    monkeypatch.setattr(roster, "GONE_S", 40.0)
    monkeypatch.setattr(roster, "LEFT_S", 10.0)
    monkeypatch.setattr("diloco_syncer.history.ledger.NAMES_MAX", 16)
    moments = churn.churn(ids=300, seconds=600, lives_s=12.0, moments=6)  # checks the balance
    assert moments[-1]["merged"] > 300
    grown = churn.growth(moments, 200)
    assert {name: g for name, g in grown.items() if g > 1.3 and name != "resident_bytes"} == {}
    assert moments[-1]["members"] < 40
    assert moments[-1]["lives"] < 40
