"""The machine monitor: a process that samples the host, the GPUs and the processes of a run."""
