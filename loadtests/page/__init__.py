"""The live page of a run: threads of the run that read its directory and show it to browsers."""
