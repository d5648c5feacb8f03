"""What runs the model: arrivals in, steps out, tokens back."""
