"""python -m colibri_lab"""

from __future__ import annotations

if __name__ == "__main__":
    try:
        from .cli import main

        code = main()
    except KeyboardInterrupt:  # before main could take care of it
        code = 130
    raise SystemExit(code)
