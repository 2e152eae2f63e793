"""Makes artifacts: from a frozen model to exits and drafts worth having."""
