"""Our engine against the goldens of tests/oracle."""
