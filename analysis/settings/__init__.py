"""What a run is held to, as its experiment says it."""
