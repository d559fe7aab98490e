"""The coordinator: REST control room, never on the training path."""
