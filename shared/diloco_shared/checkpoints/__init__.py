"""RunCheckpoints and archived tapes, in a folder or a bucket that all sites reach."""
