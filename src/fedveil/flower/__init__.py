"""Rounds inside Flower: the wire format, a client, and the engine that reaches clients through a grid."""
