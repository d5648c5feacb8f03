"""Quantiles, resampling and tests over numbers alone."""
