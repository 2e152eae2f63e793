"""Gives what people see: text coloured by depth, and benchmarks as a page."""
