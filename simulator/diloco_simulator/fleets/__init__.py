"""Failing fleets of any size, as models."""
