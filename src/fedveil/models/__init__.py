"""Networks: what they are called, how large they are, and how to build them."""
