"""Room in the run's streams: watched, made, waited for."""
