"""Blocks of residual networks."""
