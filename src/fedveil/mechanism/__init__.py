"""Plans of releases, their cost, and the integer noise that is added to them; importing this package loads no torch."""
