"""What the syncer tells of the run."""
