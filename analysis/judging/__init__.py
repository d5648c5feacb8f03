"""Comparisons, gates, checks, and the verdict that follows."""
