"""The real machines and numerics on a virtual clock."""
