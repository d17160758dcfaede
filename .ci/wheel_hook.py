"""Hatch's hook for wheels: carries the kernel sources and the embedded model inside the package.

An editable install carries nothing: there `colibri_lab/paths.py` finds both beside the package.
"""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CARRIED = {"data/tiny-moe": "colibri_lab/_data/tiny-moe", "kernels": "colibri_lab/_kernels"}


class CarryHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"].update(CARRIED)
