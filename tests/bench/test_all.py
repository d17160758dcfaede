"""`bench all`: children's rows are joined and drawn, and what fails is said without ending the others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer

from colibri_lab.bench import main, suite
from colibri_lab.bench.all_command import NAMES, app
from colibri_lab.bench.page import page
from colibri_lab.bench.suite import Part
from colibri_lab.errors import ConfigError

ROW = {"what": "speed <1>", "value": 2.0, "unit": "x", "peer": "other", "peer_value": 1.0, "ratio": 2.0,
       "limit": 4.0, "share": 0.5}  # fmt: skip
FORM = {"bench": "one", "rows": [ROW] * 30, "reasons": ["the fan"], "notes": ["a & b"]}
GOOD, LOUD = Part("one", ("--x",), 0, 1.0, FORM | {"reasons": []}), Part("two", (), 3, 2.0, FORM)
BAD = Part("three", (), 2, 0.1, None, "colibri-lab: error: no peer")


def test_every_benchmark_has_quick_arguments_that_it_takes() -> None:
    assert set(suite.QUICK) <= set(NAMES) and "all" not in NAMES
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, arguments in suite.QUICK.items():
        commands[name].make_context(name, [*arguments])


def test_parts_are_joined() -> None:
    result = suite.together([GOOD, LOUD, BAD])
    assert len(result.rows) == 60 and result.rows[0].what == "one: speed <1>" and result.rows[0].share == 0.5
    assert result.reasons == ["two: the fan"] and "three failed: colibri-lab: error: no peer" in result.notes
    codes = [suite.exit_code(parts) for parts in ([GOOD], [GOOD, LOUD], [GOOD, LOUD, BAD], [])]
    assert codes == [0, 3, 2, 0]


def test_the_page_stands_alone() -> None:
    text = page([GOOD, LOUD, BAD])
    assert not re.search(r"(src|href)=|https?:|@import|url\(", text)
    assert text.count("<svg") == 4 and text.count("speed &lt;1&gt;") == 60 + 4 * 24 and "speed <1>" not in text
    assert "the first 24 of 30" in text and "noisy: the fan" in text and "error: no peer" in text
    assert page([]).count("<svg") == 0


def test_children_run_and_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.html"
    code = main(["all", "--only", "dispatch", "--quick", "--html", str(out), "--json"])
    printed, told = capsys.readouterr()
    form = json.loads(printed.splitlines()[-1])
    assert code in (0, 3) and form["bench"] == "all" and form["rows"][0]["what"].startswith("dispatch: ")
    assert "dispatch --steps 60 --rounds 5 ..." in told and form["rows"][0]["what"][10:] in out.read_text()


def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, told = [], list[str]()

    def measure(name: str, arguments: tuple[str, ...]) -> Part:
        asked.append(name)
        return BAD if name == "three" else Part(name, arguments, 0, 1.0, FORM)

    monkeypatch.setattr(suite, "measure", measure)
    first = suite.run(["decode", "three"], False, told.append, kept=tmp_path)
    again = suite.run(["decode", "three"], False, told.append, kept=tmp_path)
    assert asked == ["decode", "three", "three"], "what ended well is not measured again"
    assert again == first and told[-3] == f"decode: kept in {tmp_path}"
    suite.run(["decode"], True, told.append, kept=tmp_path)
    assert asked[-1] == "decode" and len(asked) == 4, "other arguments are another run"
    (tmp_path / "decode.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"decode\.json is not what --keep leaves"):
        suite.run(["decode"], False, told.append, kept=tmp_path)


def test_a_child_that_fails() -> None:
    part = suite.measure("paging", ("--policies", "fifo"))
    assert (part.code, part.form) == (2, None) and "'fifo' is none of lru" in part.error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--only", "paging,nothing"], "--only 'nothing' is none of decode"), (["--html", "."], "is a folder")],
)
def test_wrong_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    from colibri_lab.cli import main as whole

    assert whole(["bench", "all", *arguments]) == 2
    assert message in capsys.readouterr().err
