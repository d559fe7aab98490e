"""What a learner and the run exchange while it trains."""
