"""Load from several processes and hosts: Locust's master and workers, and what they send each other."""
