"""What every process is alike in: settings, membership, health, logs, faults.

`keep_hub` belongs to `hub`, and lies here since units of operators name it by this path.
"""
