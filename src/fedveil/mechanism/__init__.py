"""Plans of releases, their cost, and their integer noise; importing this package does not load torch."""
