"""The message bus in memory, with sizes, limits and faults."""
