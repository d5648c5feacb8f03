"""The records of a run in files: schema, sums, reading, export."""
