"""Weights of other libraries: which tensor of theirs is which of ours, both ways.

One file for each architecture holds a table of names; `layouts` says how the axes of a
tensor differ. The tables are one to one, so that they serve loading and exporting.
"""
