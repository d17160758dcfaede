"""What a model would need, and how fast it would be, on a machine that is described by three rates."""
