"""Which sequences run next, on which blocks: counts and tables in plain Python. Imports no torch."""
