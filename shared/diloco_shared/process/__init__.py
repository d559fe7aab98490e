"""What every process is alike in: settings, membership, health, logs, faults."""
