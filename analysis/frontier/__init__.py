"""Which policy to ship at which load, and the search that finds out."""
