"""A judged run as one JSON document."""
