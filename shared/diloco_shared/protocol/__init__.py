"""Messages, subjects, wire format and chunks: no arrays, no IO."""
