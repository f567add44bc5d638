"""Convergent f-DP analysis of Noisy-FedAvg and Noisy-FedProx."""
