"""Privacy mathematics and bookkeeping. Imports numpy and scipy only, never torch."""
