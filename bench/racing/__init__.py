"""Other ways to train the same model, for comparison."""
