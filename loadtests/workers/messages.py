"""The messages between master and workers, by their names on Locust's channel."""

# Master to worker: its part of the trial; the start; the instant from which nothing is sent, to all arms or some; stop.
ASSIGN, START, END, STOP = (f"tailgate_{name}" for name in ("assign", "start", "end", "stop"))
# Worker to master.
READY, DONE = "tailgate_ready", "tailgate_done"
# Only with workers on other hosts. Worker to master: its account. Both ways: the comparison of clocks, a
# piece of a file, and how much of a file is written.
ACCOUNT, CLOCK, FILE, HAVE = (f"tailgate_{name}" for name in ("account", "clock", "file", "have"))

PROTOCOL = 6  # of all these messages: raise it with any change that an older worker would misread
