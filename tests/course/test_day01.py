"""Day 1's checks accept right answers written differently, and refuse wrong ones."""
