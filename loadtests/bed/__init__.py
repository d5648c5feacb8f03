"""The test bed: the machines of a run, and how they behaved."""
