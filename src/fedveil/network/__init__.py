"""Runs over several machines, on Flower: consent and ledger at the client, the server's and the client's process."""
