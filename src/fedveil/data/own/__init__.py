"""What people have, such as arrays, tables and files, as a `Dataset`: casts are named, what is missing is refused."""
