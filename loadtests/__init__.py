"""What drives the system under test: traffic, schedules, Locust, the experiment and its orchestration."""
