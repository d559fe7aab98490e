"""What every service shares: configuration, numerics, protocol and edges."""
