"""The schedule played by Locust: requests started in time, their records, and what playing costs."""
