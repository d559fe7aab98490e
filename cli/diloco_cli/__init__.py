"""The `diloco` command."""
