"""What the tape says: kept, followed, executed again, archived."""
