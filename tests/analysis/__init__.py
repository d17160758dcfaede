"""Replay of recorded runs under other caches."""
