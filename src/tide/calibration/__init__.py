"""Calibration: from a frozen model to an artifact with exits and drafts."""
