"""The model, the optimizer and the loop that trains."""
