"""A program of its own: lets the model in a folder write, for whoever holds no arrays himself.

The coordinator starts it (`diloco_coordinator/exports/sampling_io.py`); what it says is in
`diloco_shared/protocol/samples.py`.
"""
