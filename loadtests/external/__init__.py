"""Servers that tailgate does not start: where they are, whether they can be judged, what goes over their wire."""
