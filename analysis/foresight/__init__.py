"""What follows beyond one run: whether its tests hold, how long the next must be, what an arm would cost."""
