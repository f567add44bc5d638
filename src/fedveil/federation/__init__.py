"""Rounds of a federated run: sampling, client round, server round, engines and evaluation."""
