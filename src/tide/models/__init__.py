"""Runs any depth range of a Hugging Face causal language model."""
