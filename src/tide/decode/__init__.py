"""Decodes so that easy tokens stop early and guessed tokens go down together."""
