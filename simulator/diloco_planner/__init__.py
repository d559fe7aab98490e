"""Settings for hardware and links that one may not have yet: closed forms."""
