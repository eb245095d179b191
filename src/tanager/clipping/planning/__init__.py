"""Which method clips each part of a loss, what it costs, and why."""
