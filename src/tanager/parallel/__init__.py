"""Many devices, on one host or several: what lies where, and who speaks to whom."""
