"""Training data: rows in an order determined by a seed, and text as tokens."""
