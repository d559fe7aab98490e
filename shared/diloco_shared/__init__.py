"""What every service shares: specification, protocol, numbers, bus and process."""
