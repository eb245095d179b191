"""The maths of the guarantee: no JAX, no data, only numbers and their proof."""
