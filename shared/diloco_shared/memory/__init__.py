"""Memory for what is large, and used again."""
