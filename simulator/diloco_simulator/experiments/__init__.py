"""Training on a virtual clock."""
