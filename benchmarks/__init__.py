"""Measurements of the engine on one machine: `python benchmarks/engine.py --help`."""
