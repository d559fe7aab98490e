"""Mutants made by machine: which there are, which tests reach them, and who notices them."""
