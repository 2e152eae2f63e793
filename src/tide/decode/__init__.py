"""Decoding: easy tokens exit before the last layer, and drafted tokens are verified together."""
