"""Internal helpers: no technique lives here, and users import nothing from here."""
