"""The record of every release, and the budgets that it enforces."""
