"""What can be done at each tap: norms, per-example gradients, clipped sums."""
