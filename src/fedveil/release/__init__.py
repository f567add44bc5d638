"""The door. Data leave a client only through here: restrict, clip, noise, charge the ledger, send."""
