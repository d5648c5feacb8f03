"""How one request is sent and timed, for each kind of arm."""
