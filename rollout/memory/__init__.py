"""What memory there is, what will be taken of it, and what was."""
