"""What judges the records of a run. Imports neither torch, Locust nor servers."""
