"""Placement changes speed, never tokens."""
