"""The product's processes watched from within, for the checkers."""
