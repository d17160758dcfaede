"""What README shows works as it stands there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from colibri_lab.cli import main
from colibri_lab.config import Config


def blocks(top: Path, language: str) -> list[str]:
    """The fenced blocks of a language; "" for those that name none."""
    parts = re.split(r"^```(.*)\n", (top / "README.md").read_text("utf8"), flags=re.MULTILINE)
    fences = list(zip(parts[1::2], parts[2::2], strict=True))  # (what stands behind a fence, the text after it)
    return [text for name, text in fences[0::2] if name == language]


def test_python_example(top: Path, tmp_path: Path) -> None:
    (code,) = blocks(top, "python")
    program = f"import sys; sys.path.insert(0, {str(top)!r})\n" + code
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert len(ran.stdout) > 60
    assert "'faults'" in ran.stdout


def test_shell_example(top: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Converting, generating and planning, with the embedded model as one's own."""
    lines = [line for block in blocks(top, "") for line in block.splitlines() if line.startswith("colibri-lab")]
    assert [shlex.split(line)[1] for line in lines] == ["convert", "generate", "plan", "plan", "plan"]
    shown = {}
    for line in lines:
        words = shlex.split(line.replace("path/to/model", str(top / "data/tiny-moe")))
        words = [word.replace("path/to/config.json", str(top / "data/tiny-moe/config.json")) for word in words]
        words = [word.replace("path/to/converted", str(tmp_path / "converted")) for word in words]
        assert main([*words[1:], *(["--max-tokens", "5"] if words[1] == "generate" else [])]) == 0
        shown[words[1]] = capsys.readouterr()
    assert "5 tokens" in shown["generate"].err
    assert "tokens/s" not in shown["generate"].out, "text alone goes to stdout"
    assert "tokens/s" in shown["plan"].out


def test_config_example(top: Path, tmp_path: Path) -> None:
    (text,) = blocks(top, "yaml")
    file = tmp_path / "config.yaml"
    file.write_text(text)
    config = Config.from_yaml(file)
    assert config.expert_cache_bytes == 4 << 30
    assert config.model_path == tmp_path / "path/to/converted"


@pytest.mark.parametrize("command", ["decode", "telemetry", "perplexity"])
def test_commands_of_the_figures_exist(top: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"colibri-lab bench {command}" in (top / "README.md").read_text("utf8")
    assert main(["bench", command, "--help"]) == 0
    assert "--json" in capsys.readouterr().out
