"""Audits: statistical lower bounds on epsilon, taken from what a mechanism lets out.

subject: what is audited. intervals: exact binomial bounds. structural, single_upload, recompute: one upload. two_world: many
runs. one_run: canaries inside one run. one_shot: scores of canary clients; canary_clients: these in a real run. dpsgd,
last_model, training: DP-SGD clients, the final view, noise inside training. coupling: masks given the releases. worlds:
worst-case neighbours for each family of mechanisms.
"""
