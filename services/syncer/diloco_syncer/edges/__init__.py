"""What awaits or touches the world."""
