"""What torch.compile is asked for and what it did: the only modules that know its private parts."""
