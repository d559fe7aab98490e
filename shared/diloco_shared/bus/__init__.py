"""The message bus: what the services need of it, and how they use it in one way."""
