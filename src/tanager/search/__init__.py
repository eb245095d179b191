"""Search: find hyper-parameters at small batch, and predict what the large run reaches.

simulation      the target run, and cheap runs that train like it
space           what may vary, by name, with the papers' grids
jobs            runs in folders: killed at any moment, shared by any number of workers
study           trials chosen by Optuna; a killed worker loses nothing
scaling_law     accuracy against batch size, with an interval
experiments     tables: privacy parameters, quantity of data, ablations
private         a search with its own privacy guarantee
"""
