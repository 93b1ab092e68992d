"""One module a day: its exercises with their checks, and its line of the running bill."""
