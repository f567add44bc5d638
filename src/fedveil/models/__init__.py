"""Networks: names, sizes, and how to build them."""
