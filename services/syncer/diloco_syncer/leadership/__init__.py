"""Who leads a run's shard: from its first parameters to its end."""
