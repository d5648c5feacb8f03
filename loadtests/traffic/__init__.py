"""What is sent and when, fixed before the first request. Pure and seeded."""
