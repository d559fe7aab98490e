"""A wide-area link on one machine, and what is measured over it."""
