"""An experiment: what it is, how its file is read, what the command line changes in it, and what must hold of it."""
