"""The syncer: owns the global fragments and the outer optimizer."""
