"""What compiles look like from outside: from the records of requests alone, without telemetry."""
