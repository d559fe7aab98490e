"""Who uses a world: its user, visitors, and runs that come later."""
