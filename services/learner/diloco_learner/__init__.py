"""The learner: an island of compute that trains a full model copy."""
