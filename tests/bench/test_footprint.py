"""What `bench footprint` counts: the memory of its children, not its own."""

from __future__ import annotations

import sys

import pytest

from colibri_lab.bench import footprint


def test_a_child_s_memory_is_seen() -> None:
    held = 64 << 20
    bare = footprint.started("")
    filled = footprint.started(f"held = bytearray({held})\nheld[::4096] = bytes(len(held[::4096]))")
    assert held <= filled["RssAnon"] - bare["RssAnon"] < held + (8 << 20)
    found, out = footprint.peaks([sys.executable, "-c", f"import time; held = b'x' * {held}; time.sleep(.2); print(1)"])
    assert found["VmHWM"] > held and out == "1\n"
    assert found["RssAnon"] + found["RssFile"] >= found["VmHWM"]
    with pytest.raises(RuntimeError, match=r"-c .* ended with 3: gone"):
        footprint.peaks([sys.executable, "-c", "import sys; print('gone', file=sys.stderr); sys.exit(3)"])


def test_the_embedded_model_in_little_memory() -> None:
    rows = {row.what: row for row in footprint.run(footprint.Plan(tokens=12)).rows}
    least, usual = rows["generate, least settings: resident"].value, rows["generate: resident"].value
    imports = rows["all imports of generate: resident"].value
    assert rows["interpreter: resident"].value < imports < least < usual
    assert rows["generate: imports' part"].value == pytest.approx(100 * imports / usual)
    assert usual < footprint.GOAL / 1e6
