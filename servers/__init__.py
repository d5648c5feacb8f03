"""The system under test: one engine process per arm replica, and the splitter before them."""
