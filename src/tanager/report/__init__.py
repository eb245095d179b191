"""Pictures and reports of plans and runs."""
