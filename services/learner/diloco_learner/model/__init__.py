"""Models: anything with `init` and `loss` over a pytree."""
