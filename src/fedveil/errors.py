"""The errors a user can meet. Each message says what was given, what is allowed and what to do."""

from __future__ import annotations


class FedveilError(Exception):
    """Base of all errors that fedveil raises for a user to read; the CLI prints one line and exits with 2."""


class ConfigError(FedveilError, ValueError):
    """A configuration or an argument that cannot be accepted."""


class DataError(FedveilError):
    """A data set that is missing, unreadable or not what it says it is."""


class UpdateRefused(FedveilError):
    """A client's update that the door does not let out: NaN, infinite, mis-shaped, mis-typed or oversized."""


class BudgetExhausted(FedveilError):
    """A release that would exceed the privacy budget; nothing was released."""


class LedgerError(FedveilError):
    """A ledger that cannot be opened, read or trusted."""
