"""The trainer: sample, clip, add noise, update, remember, resume."""
