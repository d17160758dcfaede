"""Hugging Face folders into model.colibri."""

from .cache import ensure_converted
from .run import convert

__all__ = ["convert", "ensure_converted"]
