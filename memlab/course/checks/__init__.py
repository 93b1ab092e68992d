"""One module a day: its exercises with their checks, its line of the bill, its trials of rules."""
