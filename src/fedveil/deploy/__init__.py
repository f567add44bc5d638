"""Runs over several machines, on Flower: wire format, client consent and ledger, server and client processes."""
