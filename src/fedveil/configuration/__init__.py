"""Configurations, presets and plugins."""
