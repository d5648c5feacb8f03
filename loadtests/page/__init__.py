"""The live page of a run: a process of its own that reads the run directory and shows it to browsers."""
