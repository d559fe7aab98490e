"""Which rare states worlds reach."""
