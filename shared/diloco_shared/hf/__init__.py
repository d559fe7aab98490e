"""Hugging Face checkpoints: their configurations and names, to and from ours."""
