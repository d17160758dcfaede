"""What is wrong with a model file or folder, said in one line."""

from __future__ import annotations


class ModelError(ValueError):
    """A model cannot be used as it is: one line that names the file and tensor, and the way out where there is one."""


class ModelWarning(UserWarning):
    """A model contradicts itself in a way that a documented rule decides."""
