"""Servers of somebody else: where they are, whether they can be judged, what goes over their wire."""
