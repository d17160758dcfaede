"""Benchmarks beside limits and peers: harness, results, and `colibri-lab bench`. Importing this loads nothing more."""

from __future__ import annotations

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """`colibri-lab bench ...`; returns the exit code: 0 done, 2 wrong input or no peer, 3 too noisy to be trusted."""
    from colibri_lab.bench.all_command import app

    return int(app(args=argv, prog_name="colibri-lab bench", standalone_mode=False) or 0)
