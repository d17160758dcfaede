"""The command line from outside: exit codes, what goes where, and no traceback for anything a person does wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colibri_lab.cli import main
from colibri_lab.convert import convert
from colibri_lab.paths import embedded_model
from colibri_lab.performance import performance

COMMAND = [sys.executable, "-m", "colibri_lab"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(embedded_model(), tmp_path_factory.mktemp("models") / "tiny moe é", quantize="int4")


def run(*arguments: object, **more: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, **more
    )  # type: ignore[call-overload]
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_text_alone_on_stdout(model: Path) -> None:
    done = run(
        "generate", "--model", model, "--prompt", "The sea was", "--max-tokens", 8, "--set", "expert_cache_bytes=1MiB"
    )
    assert done.returncode == 0
    assert done.stdout.endswith("\n") and len(done.stdout.split()) >= 4 and "INFO" not in done.stdout
    for what in (
        "model   tiny-moe: mixtral",
        "router  softmax",
        "pager   1.0 of 8.0 MiB",
        "kv      2048",
        "mode    sync",
        "backend cpu",
    ):
        assert f"INFO  {what}" in done.stderr
    last = done.stderr.splitlines()[-1]
    for part in ("8 tokens", "first after", "ms/token P50", "P95", "P99", "tokens/s", "faults", "hit rate", "MiB read"):
        assert part in last


def test_json_is_one_strict_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"model_path: '{model}'\nthreads: 1\n")
    done = run("generate", "--config", tmp_path / "config.yaml", "--prompt", "The sea was", "--max-tokens", 8, "--json")
    assert done.stdout.count("\n") == 1

    def never(constant: str) -> None:
        raise AssertionError(constant)

    result = json.loads(done.stdout, parse_constant=never)
    assert set(result) == {"text", "tokens", "ttft_ms", "ms_per_token", "tokens_per_s", "counters"}
    assert set(result["ms_per_token"]) == {"p50", "p95", "p99"} and result["tokens"] == 8 and result["tokens_per_s"] > 0
    assert result["counters"]["engine"]["decode_tokens"] == 7
    again = run(
        "generate", "--config", tmp_path / "config.yaml", "--prompt", "-", "--max-tokens", 8, input="The sea was"
    )
    assert again.stdout == result["text"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--model", "no/such/folder"], "no/such/folder: no such model"),
        (["generate", "--config", "none.yaml"], "none.yaml: cannot be read"),
        (["generate", "--set", "expert_cache_byte=1"], "did you mean expert_cache_bytes?"),
        (["generate", "--config", "."], ".: cannot be read"),
        (["generate", "--set", "tokenizer_path=no/such"], "tokenizer_path: no/such: no tokenizer.json"),
        (
            ["generate", "--set", "kv_cache_max_slots=1048576", "--set", "kv_cache_slot_size=65536"],
            "kv_cache_max_slots: 1048576 slots of 65536 tokens",
        ),
        (["generate", "--set", "model_path=no/such"], "--set model_path: the model is named by --model already"),
        (["generate", "--set", "nonsense"], "must be key=value"),
        (["generate", "--set", "pace=[1"], "--set pace"),
        (["generate", "--set", "dispatch_ring_size=64"], "dispatch_ring_size: engine_mode sync has no rings"),
        (
            ["generate", "--set", "cpu_affinity_mask=0x10000000000"],
            "cpu_affinity_mask: this process cannot have core 40",
        ),
        (["generate", "--set", "backend=cuda"], "backend: cuda: "),
        (["generate", "--set", "expert_cache_bytes=1KiB"], "the least is"),
        (["generate", "--max-tokens", "-1"], "max_tokens"),
        (["generate", "--temperature", "-1"], "temperature"),
        (["generate", "--frob"], "frob"),
        (["generate", "--max-tokens", "many"], "--max-tokens"),
        (["convert", "no/such", "out"], "no/such"),
        (["trace", "--max-tokens", "2", "--out", "no/such/folder/trace.jsonl"], "no/such/folder"),
        (["trace", "--out", "."], ".: is a folder, not a file to write"),
        (["trace", "--set", "telemetry=false"], "telemetry: must be on to record a trace"),
        (["serve", "--anything", "3"], "serve: not available yet"),
        (["serve"], "serve: not available yet"),
        (["lab", "no.ipynb"], "no.ipynb: no such notebook"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_wrong_input(
    arguments: list[str], says: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if arguments[0] in ("generate", "trace") and not {"--model", "--config"} & set(arguments):
        arguments = [*arguments, "--model", str(model)]
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    error = [line for line in err.splitlines() if not line.startswith("INFO")]
    assert out.strip() == "" and len(error) == 1 and error[0].startswith("colibri-lab: error: ") and says in error[0]


def test_what_the_machine_gives_is_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = (
        "batch_adapt_interval_ms=500",
        "io_priority=idle",
        f"cpu_affinity_mask={1 << min(os.sched_getaffinity(0))}",
    )
    sets = [part for setting in settings for part in ("--set", setting)]
    assert main(["generate", "--model", str(model), "--prompt", "A", "--max-tokens", "1", *sets]) == 0
    said = dict(line.split(maxsplit=2)[1:] for line in capsys.readouterr().err.splitlines() if line.startswith("INFO"))
    assert "fewer when memory is tight (a look every 500 ms)" in said["mode"]
    assert said["host"].startswith("cores 0x") and "disk priority idle (" in said["host"]


def test_a_wrong_isa_level_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLIBRI_ISA", "sse9")
    assert main(["generate", "--model", str(model), "--prompt", "A"]) == 2
    assert (
        capsys.readouterr().err
        == "colibri-lab: error: COLIBRI_ISA: 'sse9' is none of amx, avx512, avx2, dotprod, neon, plain\n"
    )


def test_a_config_file_by_any_name(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "colibri.conf"
    file.write_text("threads: 1\n")
    assert main(["generate", "--config", str(file), "--prompt", "A"]) == 2
    assert f"{file}: model_path: names no model" in capsys.readouterr().err
    assert main(["generate", "--config", str(file), "--model", str(model), "--prompt", "A", "--max-tokens", "1"]) == 0
    file.write_text(f"model_path: '{model}'\nthreads: 0\n")
    assert main(["generate", "--config", str(file), "--prompt", "A"]) == 2
    assert f"{file}: threads: " in capsys.readouterr().err


def test_convert_and_trace(tmp_path: Path) -> None:
    done = run("convert", embedded_model(), tmp_path / "out", "--quantize", "int8", "--group-size", 64)
    assert done.returncode == 0 and (tmp_path / "out" / "model.colibri").exists() and done.stdout == ""
    assert run("convert", embedded_model(), tmp_path / "out").returncode == 2  # there is one already
    assert run("convert", embedded_model(), tmp_path / "other", "--expert-split", 3).returncode == 2
    done = run(
        "trace",
        "--out",
        tmp_path / "trace.jsonl",
        "--model",
        tmp_path / "out",
        "--prompt",
        "The sea",
        "--max-tokens",
        5,
    )
    assert done.returncode == 0 and "trace.jsonl" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert len(lines) > 5


def shell(line: str, model: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A shell line with $RUN for a generation of many tokens."""
    environment = {**os.environ, "PY": sys.executable, "MODEL": str(model), **env}
    line = line.replace("$RUN", '"$PY" -m colibri_lab generate --model "$MODEL" --max-tokens 300')
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line}"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done


def test_a_reader_that_leaves(model: Path) -> None:
    done = shell("$RUN --prompt 'The sea' --set pace=200 | head -c 5", model)
    assert len(done.stdout) == 5 and done.returncode in (0, 141)
    assert "INFO  done    300 tokens" not in done.stderr  # the engine stopped


def test_closed_stdout_and_stderr(model: Path) -> None:
    assert shell("$RUN --prompt A --max-tokens 3 >&-", model).returncode == 0
    assert shell("$RUN --prompt A --max-tokens 3 2>&-", model).stdout.strip()
    assert shell("$RUN --prompt A --max-tokens 3 <&- >&- 2>&-", model).returncode == 0


def test_what_stdout_cannot_say_is_replaced(model: Path) -> None:
    done = shell(
        "$RUN --prompt \"$(printf 'caf\\303\\251 \\360\\237\\220\\246 \\377')\" --max-tokens 30",
        model,
        PYTHONIOENCODING="ascii",
        LC_ALL="C",
    )
    assert done.returncode == 0 and done.stdout.isascii()


def test_interrupt_ends_with_130(model: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "--model", str(model), "--prompt", "The sea", "--max-tokens", "900", "--set", "pace=50"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.read(1)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and b"Traceback" not in err
    assert time.monotonic() - begin < 10, "at this pace all of it takes 18 s"
    assert b"INFO  done" in err and out.endswith(b"\n")


def test_interrupt_while_loading(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("colibri_lab.engine.engine.Engine.load", pressed)
    assert main(["generate"]) == 130 and capsys.readouterr().out == ""


def test_performance_of_nothing_and_of_one_token() -> None:
    counters = {"pager": {"faults": 0, "hits": 0, "bytes_read": 0}}
    assert performance(1.0, [], [], counters)["tokens_per_s"] == 0
    one = performance(1.0, [1.5], [500.0], counters)
    assert (one["tokens"], one["ttft_ms"], one["tokens_per_s"]) == (1, 500.0, 2.0)
    three = performance(0.0, [1.0, 1.5, 2.0], [1000.0, 400.0, 600.0], counters)
    assert three["tokens_per_s"] == 2.0 and three["ms_per_token"] == {"p50": 500.0, "p95": 590.0, "p99": 598.0}


def test_import_is_light() -> None:
    code = """
import sys
import colibri_lab
heavy = {"cupy", "plotly", "torch", "ipywidgets", "anywidget"}
assert not (heavy | {"numpy", "pydantic", "typer"}) & set(sys.modules)
assert {"Engine", "Lab", "connect", "replay", "Config", "ModelFile"} <= set(dir(colibri_lab))
colibri_lab.Engine
assert not heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
