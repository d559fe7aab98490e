"""Parts of `bench/transport.py`: client processes, bare streams, whole rounds."""
