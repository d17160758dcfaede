"""What is right: a float64 NumPy forward of our own, and goldens that transformers made."""
