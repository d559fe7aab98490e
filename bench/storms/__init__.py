"""Real stacks under seeded storms of faults: what bench/soak.py and bench/replay.py share."""
