"""Precision policies, their schedules, and torch's own precision switches."""
