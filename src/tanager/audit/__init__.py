"""Attacks on private training, and what their success proves about its ε."""
