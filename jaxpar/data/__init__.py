"""What a job learns from: rows in an order that a seed decides, and text as tokens."""
