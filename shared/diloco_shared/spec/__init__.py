"""What a run is: its specification, checked; what its model and optimizers are made of."""
