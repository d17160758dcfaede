"""The report is one file that reads offline, says the run's figures, and escapes what the model says."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser

import pytest

from colibri_lab.telemetry import Telemetry
from colibri_lab.view.html import duration, grid, number, percent, size, table, words
from colibri_lab.view.report import figure, report
from colibri_lab.view.run import RunView
from tests.widgets.fake import FakeEngine

VOID = {"meta", "br", "path"}


class Wellformed(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.seen = [], set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.seen.add(tag)
        for name, value in attributes:
            assert not name.startswith("on")
            assert name not in ("src", "href")
            assert "url(" not in (value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def test_a_report_is_one_offline_file(tmp_path):
    engine = FakeEngine(slots=128)
    engine.run(80)
    sequence = engine.start(2)
    engine.telemetry.note("prompt", {"sequence": sequence, "text": "<script>alert(1)</script>"})
    engine.telemetry.text(sequence, 3, "<img src=x>")
    for position in range(30):
        engine.step(sequence, position, int(position > 1))
    path = report(engine, tmp_path / "run.html")
    text = path.read_text(encoding="utf-8")
    found = Wellformed(text)
    assert "script" not in found.seen
    assert {"svg", "table", "details"} <= found.seen
    assert "http" not in text
    assert len(re.findall("role='img'", text)) == 6, "four of the run, pages and batch; the other systems are off"
    assert "prefers-color-scheme:dark" in text
    assert "fake-moe" in text
    assert "&lt;script&gt;" in text
    assert [p.name for p in tmp_path.iterdir()] == ["run.html"]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 1), (64, 256, 8)])
def test_odd_shapes_and_empty_runs(shape, tmp_path):
    Wellformed(figure(RunView(*shape)))
    engine = FakeEngine(*shape, slots=16, slot_size=4)
    engine.run(12)
    path = report(engine.telemetry, tmp_path / "r.html")
    Wellformed(path.read_text())
    assert path.stat().st_size < 1_000_000
    Wellformed(report(Telemetry(*shape), path).read_text())


def test_a_report_that_cannot_be_written_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        report(Telemetry(1, 1, 1), tmp_path / "none" / "r.html")
    assert caught.value.filename == str(tmp_path / "none" / "r.html")
    with pytest.raises(IsADirectoryError, match="is a folder, not a file") as caught:
        report(Telemetry(1, 1, 1), tmp_path)
    assert caught.value.filename == str(tmp_path)
    assert not list(tmp_path.iterdir())
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a device or a pipe"):
        report(Telemetry(1, 1, 1), tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_words_for_people():
    assert [number(v) for v in (0.0, 0.1234, 1.234, 12.34, 1234.5, None, float("nan"))] == [
        "0", "0.123", "1.23", "12.3", "1,234", "–", "–"]  # fmt: skip
    assert [size(v) for v in (None, 12, 65536, 3 << 20)] == ["–", "12 B", "64.0 KiB", "3.00 MiB"]
    assert [duration(v) for v in (None, 0.5, 12.0, 1500.0)] == ["–", "500 µs", "12.0 ms", "1.50 s"]
    assert [words(v) for v in (True, 1234, None, "<a>")] == ["yes", "1,234", "–", "<a>"]
    assert percent(0.914) == "91.4 %"
    assert "&lt;b&gt;" in table({"<b>": "<i>"})
    Wellformed(grid(("a", "b"), [(1, 2.5)]))
    Wellformed(table({"a": 1}, "caption"))
