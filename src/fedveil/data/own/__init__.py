"""Arrays, tables and files as a `Dataset`: casts are reported, and missing values are refused."""
