"""The syncer's own state on disk, and where one is found."""
