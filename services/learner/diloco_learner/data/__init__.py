"""Corpora, tokenizers and virtual data shards."""
