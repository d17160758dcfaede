"""Tests: one folder a room; `makers` builds the inputs, `oracle` says what is right."""
