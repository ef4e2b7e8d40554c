"""Precision policies on modules and graphs, and their schedules."""
