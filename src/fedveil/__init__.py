"""fedveil: differentially private federated learning whose privacy you can check."""

__version__ = "0.1.0"
