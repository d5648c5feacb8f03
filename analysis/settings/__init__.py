"""What a run is held to, by its experiment."""
