"""Which runs there are, where they stand, and who works for them."""
