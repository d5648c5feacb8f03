"""What torch.compile is asked for and what it did: the only rooms that know its private parts."""
