"""The messages between master and workers, by their names on Locust's channel."""

# Master to worker, or to all of them.
ASSIGN, START, STOP = "tailgate_assign", "tailgate_start", "tailgate_stop"
# Nothing that is due at an instant or later is sent, to any arm or to some; what is under way goes on.
END = "tailgate_end"
# Worker to master.
READY, DONE = "tailgate_ready", "tailgate_done"
# Both ways, only with workers that have a disk of their own: the request for a part of the share and the part, a
# message for comparing clocks and its answer; records and how far they are written; the worker's account of itself.
PART, CLOCK, ROWS, KEPT, ACCOUNT = (f"tailgate_{name}" for name in ("part", "clock", "rows", "kept", "account"))
# Samples of the worker's host at the end of a trial, and how far they have come.
MACHINES = "tailgate_machines"

PROTOCOL = 4  # of all these messages: raise it with any change that an older worker would misread
