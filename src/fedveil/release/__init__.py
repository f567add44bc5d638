"""The door, through which all client data are released: restrict, clip, noise, charge the ledger, send."""
