"""Whether two arms compute the same."""
