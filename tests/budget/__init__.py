"""The memory budget is honest: measured from outside, on a model that is much larger."""
