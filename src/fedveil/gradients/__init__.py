"""The gradient of each example, and its norm."""
