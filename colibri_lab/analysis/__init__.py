"""What a run would have cost with another cache: replay of recorded routes, the best possible, miss-ratio curves."""
