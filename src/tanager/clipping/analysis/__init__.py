"""What a loss says: its taps, links, refusals, and how its arithmetic rounds."""
