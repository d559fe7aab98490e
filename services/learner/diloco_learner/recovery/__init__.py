"""How a learner begins, comes back, keeps its state and leaves."""
