"""What goes wrong in a world."""
