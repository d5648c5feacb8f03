"""What shares traffic among arms: Envoy, its configuration and its weights."""
