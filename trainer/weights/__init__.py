"""What is trained: its optimizer, where the built-in model begins, an adapter, and the memory that all of it takes."""
