"""Parts of bench/large.py: models of a given size, who holds how much, learners without a model."""
