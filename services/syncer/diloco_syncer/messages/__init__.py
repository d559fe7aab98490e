"""Between the bus and the machine: what comes in, what goes out."""
