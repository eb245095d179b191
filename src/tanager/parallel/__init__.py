"""Many devices, on one host or several: which holds what, and how hosts agree."""
