"""Weights that are taken out of runs: made by a process of their own, kept, handed out."""
