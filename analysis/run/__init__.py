"""A run cut into arms, trials and blocks, and what its requests and compiles did to each other."""
