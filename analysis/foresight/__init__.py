"""What a run says beyond itself: whether its tests hold, and what an arm would cost."""
