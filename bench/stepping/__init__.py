"""Parts of bench/learner_step.py: sizes, loops in processes of their own, a cluster."""
