"""Internal helpers shared by every technique; not part of the public API."""
