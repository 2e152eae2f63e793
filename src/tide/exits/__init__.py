"""Turns middle states into tokens, and decides when that is good enough. Shared by all engines."""
