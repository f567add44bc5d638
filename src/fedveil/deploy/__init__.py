"""Runs over several machines, on Flower: wire format, consent and ledger at the client, the processes of server and client."""
