"""Output for people: text coloured by depth, and benchmarks as a page."""
