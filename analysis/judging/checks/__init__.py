"""Conditions without which some gates mean nothing, each a function from what was seen to a `Check`."""
