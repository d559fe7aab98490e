"""The run's numbers: kept, merged, published, read back."""
