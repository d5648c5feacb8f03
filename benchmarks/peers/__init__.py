"""What tailgate's load generator and splitter are measured against: each a process of its own."""
