"""Worlds of whole processes: the product's own, from entry to the bytes on a bus in memory."""
