"""The machine monitor: the machines of a run, and how they behaved."""
