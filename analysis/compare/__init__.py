"""Compare: whether a later run of a server may replace an earlier one."""
