"""What is trained: its optimizer, where the built-in model begins, and the memory that all of it takes."""
