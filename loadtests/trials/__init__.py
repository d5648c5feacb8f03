"""One run: trials, the processes of each, their telemetry, and what the user sees of it."""
