"""`make demo`: text, the performance line, a page that stands alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from colibri_lab import demo
from colibri_lab.performance import performance


def test_demo_writes_text_figures_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert demo.main(["--tokens", "12", "--report", str(page)]) == 0
    said = capsys.readouterr().out
    for prompt in demo.PROMPTS:
        assert prompt in said
    line = next(line for line in said.splitlines() if "tokens/s" in line)
    assert line.startswith("60 tokens")
    assert int(re.search(r"(\d+) faults", line)[1]) > 100, "a quarter of the expert memory must fault"
    html = page.read_text("utf8")
    assert "<svg" in html
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", html), "the page loads nothing"
    assert "<script src" not in html


def test_demo_repeats_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The budget changes the figures and no letter of the text."""
    texts = []
    for budget in ("2MiB", "8MiB"):
        demo.main(["--tokens", "8", "--budget", budget, "--report", str(tmp_path / "r.html")])
        said = capsys.readouterr().out
        texts.append(said.split("-" * 78, 1)[1].rsplit("-" * 78, 1)[0])
    assert texts[0] == texts[1]


def test_percentiles_are_of_decoded_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token of each text has waited for its prompt: only the very first is there, for the time it took."""
    seen: list[int] = []

    def counted(begin: float, times: list[float], latencies: list[float], counters: object) -> dict[str, object]:
        seen.extend((len(times), len(latencies)))
        return performance(begin, times, latencies, counters)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "performance", counted)
    assert demo.main(["--tokens", "4", "--report", str(tmp_path / "r.html")]) == 0
    assert seen == [20, 16]


@pytest.mark.parametrize("wrong", [["--budget", "1KiB"], ["--budget", "much"], ["--tokens", "-1"]])
def test_wrong_input_is_one_line(tmp_path: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "report.html"
    assert demo.main([*wrong, "--report", str(page)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert not page.exists()
