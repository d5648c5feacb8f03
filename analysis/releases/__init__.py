"""Two runs over time: what each release of a server did, and whether the later one may replace the earlier."""
