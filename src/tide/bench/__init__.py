"""Measurements that users run on their own models and prompts."""
