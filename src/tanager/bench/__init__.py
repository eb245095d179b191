"""What private training costs: seconds, memory and compilations, next to plain SGD."""
