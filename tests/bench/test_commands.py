"""`colibri-lab bench` as a person and as a program meets it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from colibri_lab.bench import decode, main
from colibri_lab.bench.command import finish
from colibri_lab.bench.harness import Block
from colibri_lab.bench.peer import LlamaPeer, PeerError
from colibri_lab.bench.peer_child import serve
from colibri_lab.bench.result import Result


def last_line(text: str) -> Any:
    return json.loads(text.strip().splitlines()[-1])


def test_decode_prints_the_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["decode", "--shape", "nano", "--rounds", "2", "--tokens", "4", "--prompt", "8", "--json"])
    form = last_line(capsys.readouterr().out)
    assert code in (0, 3)
    assert form["noisy"] is (code == 3)
    rows = {row["what"]: row for row in form["rows"]}
    speed = rows["decode, 1 thread, CPU time"]
    assert speed["unit"] == "tokens/s"
    assert speed["value"] > 0
    assert speed["share"] == pytest.approx(speed["value"] / speed["limit"], rel=1e-3)
    assert speed["peer"] is None
    assert speed["ratio"] is None


def test_telemetry_states_its_cost(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["telemetry", "--shape", "nano", "--rounds", "2", "--tokens", "4", "--json"])
    rows = last_line(capsys.readouterr().out)["rows"]
    assert code in (0, 3)
    assert [row["limit"] for row in rows if row["unit"] == "% of decode"] == [2.0, 0.2, 1.0]


def test_perplexity_compares_with_fp16(tmp_path: Path, capsys: pytest.CaptureFixture[str], top: Path) -> None:
    text = (top / "data" / "validation" / "math.txt").read_text()
    (tmp_path / "math.txt").write_text(text[:1500])
    assert main(["perplexity", "--text", str(tmp_path), "--json"]) == 0
    rows = {row["what"]: row for row in last_line(capsys.readouterr().out)["rows"]}
    assert rows["int4, math"]["peer_value"] < 3
    assert rows["int4, all domains"]["value"] < 1.05


def test_router_counts_and_times_every_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str], top: Path) -> None:
    """More rows than the text has: the model writes the rest itself, and stops where it has enough."""
    text = (top / "data" / "validation" / "novel.txt").read_text()
    (tmp_path / "novel.txt").write_text(text[:1500])
    small = ["--rows", "12000", "--random-rows", "1000", "--rounds", "2", "--characters", "500", "--bits", "12"]
    small += ["--prompts", "2"]
    assert main(["router", "--text", str(tmp_path), *small, "--json"]) in (0, 3)
    rows = {(row["what"], row["unit"]): row for row in last_line(capsys.readouterr().out)["rows"]}
    name = "recorded, 16 experts, top-2"
    recorded = rows[f"{name}: rows", "rows"]["value"]
    distinct = rows[f"{name}: different rows", "rows"]["value"]
    assert 12000 <= distinct < 12000 + 8 * 300 and distinct <= recorded
    assert rows[f"{name}, two_stage: wrong selections", f"of {recorded}"]["value"] == 0
    assert rows[f"{name}, two_stage: rows that differ from softmax in any bit", f"of {recorded}"]["value"] == 0
    assert rows[f"{name}, bit_level: wrong selections", "%"]["value"] <= 0.2
    assert rows["perplexity change, two_stage", "%"]["value"] == 0
    assert rows["random, 64 experts, top-8, two_stage: fallback", "% of rows"]["value"] == 0  # of 12 bits
    for experts in (8, 64, 128, 256):
        found = [row for (what, unit), row in rows.items() if f"random, {experts} " in what and unit == "ns a row"]
        assert len(found) == 16 and all(row["value"] > 0 for row in found)
    for mode in ("sync", "async"):
        early = f"256 rows, 64 experts, 50 % in memory, {mode}"
        assert rows[f"{early}: issued", "experts a prompt"]["value"] > 0 < rows[f"{early}: a prompt", "ms"]["value"]


def test_kv_compares_both_kinds_of_attention(tmp_path: Path, capsys: pytest.CaptureFixture[str], top: Path) -> None:
    text = (top / "data" / "validation" / "python.txt").read_text()
    (tmp_path / "python.txt").write_text(text[:4000])
    small = ["--shape", "nano", "--lengths", "2048,1024", "--rounds", "2", "--tokens", "2"]
    assert main(["kv", *small, "--text", str(tmp_path), "--characters", "3000", "--json"]) in (0, 3)
    form = last_line(capsys.readouterr().out)
    rows = {row["what"]: row for row in form["rows"]}
    fewer = [rows[f"{length} tokens: fewer bytes"]["value"] for length in (1024, 2048)]
    assert 20 < fewer[0] < fewer[1] < 90  # the longer the history, the smaller the near part of it
    exact = rows["2048 tokens: attention reads"]["peer_value"]
    assert exact == pytest.approx(2 * 2049.5 * 2 * 2 * 64 * 2 / 1e6, rel=1e-4)  # layers, tokens, K and V, heads, fp16
    assert rows["1024 tokens: decode, CPU time"]["peer"] == "exact"
    assert 0 < rows["2048 tokens: logits change"]["value"] < 30
    assert 0.9 < rows["embedded model, all: perplexity"]["value"] < 1.1
    assert rows["placing a prompt's token in a layer, after 2048 tokens"]["value"] > 0
    assert any("repeats their keys" in note for note in form["notes"])


def test_hidden_states_are_heard_once(tmp_path: Path) -> None:
    """As many rows as layers times tokens, and the engine's backend is its own again afterwards."""
    from colibri_lab.bench.hidden import listen
    from colibri_lab.engine.engine import Engine
    from colibri_lab.paths import embedded_model

    with Engine.load(embedded_model(), max_batch_size=16, prefill_chunk=256, telemetry=False) as engine:
        seen = [0] * 8

        def sink(layer: int, x: Any) -> None:
            assert x.shape[1] == 256
            seen[layer] += len(x)

        backend, text = engine._parts.transformer.backend, "The sea was calm."
        tokens = len(engine.tokenizer.encode(text))
        assert listen(engine, [text], 8 * tokens, sink) == (8 * tokens, 8 * tokens)
        assert seen == [tokens] * 8 and engine._parts.transformer.backend is backend


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["router", "--text", "nowhere"], "data/validation"),
        (["decode", "--shape", "m9"], "nano, m0, m1, m2"),
        (["decode", "--shape", "nano", "--peer", "vapour"], "none, llama.cpp, transformers"),
        (["decode", "--shape", "nano", "--peer", "transformers", "--no-repack"], "llama.cpp's"),
        (["decode", "--shape", "nano", "--isa", "mmx"], "mmx' is none of amx, avx512"),
        (["prefill", "--shape", "nano", "--tokens", "5000"], "leaves room for"),
        (["decode", "--shape", "nano", "--prompt", "5000"], "leaves room for"),
        (["telemetry", "--shape", "m9"], "nano, m0, m1, m2"),
        (["perplexity", "--text", "nowhere"], "data/validation"),
        (["paging", "--text", "nowhere"], "data/validation"),
        (["kv", "--text", "nowhere"], "data/validation"),
        (["kv", "--lengths", "long"], "--lengths 'long': whole numbers by commas"),
        (["kv", "--lengths", "1000"], "at least 1024 tokens each"),
        (["paging", "--policies", "fifo"], "lru, lfu, lfru, slru, least_stale"),
        (["paging", "--prefetchers", "next"], "none, neighbour, history, next_gate"),
        (["paging", "--budgets", "half"], "25,50,75"),
        (["paging", "--shape", "m9"], "nano, m0, m1, m2"),
        (["paging", "--budgets", "1"], "2 to 100"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 1
    assert said in errors[0]


def test_missing_peer_names_the_extra(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An interpreter without llama-cpp-python: a copy of this one that sees no site-packages."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    assert main(["decode", "--shape", "nano", "--peer", "llama.cpp", "--peer-python", str(bare)]) == 2
    assert "colibri-lab[peers]" in capsys.readouterr().err


def test_missing_interpreter_is_named() -> None:
    with pytest.raises(PeerError, match="no-such-python"):
        LlamaPeer("no-such-python")


def test_a_child_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 5\n")
    dying.chmod(0o755)
    with LlamaPeer(str(dying)) as peer, pytest.raises(PeerError, match="out of luck"):
        peer.ask("load")


def test_the_childs_protocol() -> None:
    """Requests in order; an error is an answer and not the end; close ends."""

    class Fake:
        settings = "none"

        def __init__(self, path: str) -> None:
            if path != "good":
                raise OSError(f"cannot load {path}")

        def decode(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
            return {"prompt": [1, 1, 0], "steps": [[1, 1, 0] for _ in tokens]}

    asked = [
        {"op": "make", "path": "here"},
        {"op": "load", "path": "bad"},
        {"op": "load", "path": "good"},
        {"op": "decode", "prompt": [1], "tokens": [2, 3]},
        {"op": "close"},
        {"op": "decode", "prompt": [1], "tokens": [4]},
    ]
    said = io.StringIO()
    requests = io.StringIO("".join(json.dumps(line) + "\n" for line in asked))
    serve(requests, said, Fake, {"make": lambda path: {"made": path}})
    answers = [json.loads(line) for line in said.getvalue().splitlines()]
    assert answers[0] == {"made": "here"}
    assert "cannot load bad" in answers[1]["error"]
    assert answers[2] == {"settings": "none"}
    assert len(answers[3]["steps"]) == 2
    assert len(answers) == 4


def test_noise_is_told_by_the_rounds() -> None:
    """Ratios that differ make a run noisy; a machine that slows both sides alike does not."""

    def judged(mine: list[float], theirs: list[float]) -> list[str]:
        sides = [[Block(1, cpu_s=1 / rate) for rate in side] for side in (mine, theirs)]
        result = Result("x")
        decode._judge([10.0] * 4, *sides, result, one=True, delay=0.5)
        return result.reasons

    assert not judged([100, 50, 100, 50], [50, 25, 50, 25])
    assert judged([100, 50, 100, 50], [50, 50, 50, 50])


def test_exit_code_of_a_noisy_run(capsys: pytest.CaptureFixture[str]) -> None:
    import typer

    with pytest.raises(typer.Exit) as left:
        finish("x", lambda: Result("x", reasons=["busy"]), True)
    assert left.value.exit_code == 3
    assert last_line(capsys.readouterr().out)["noisy"] is True


def test_same_tokens_go_to_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the peer decodes is what we decoded before it, so both read the same experts."""
    seen: list[tuple[list[int], list[int]]] = []

    class Fake:
        name, settings = "fake", "none"

        def decode(self, prompt: list[int], tokens: list[int]) -> tuple[Block, Block]:
            seen.append((prompt, tokens))
            return Block(len(prompt), 1, 1), Block(len(tokens), 1, 1)

    plan = decode.Plan(decode.shape_named("nano"), rounds=1, tokens=5, prompt=6)
    with decode._engine(plan) as engine:
        decode._rounds(plan, engine, Fake())  # type: ignore[arg-type]
        for prompt, tokens in seen:
            ours = [token.id for token in engine.generate(prompt, max_tokens=6)]
            assert tokens == ours[:-1]
    assert len(seen) == 2  # the round to warm up, and the one that counts


def test_paging_of_random_weights(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["paging", "--shape", "nano", "--budgets", "60", "--policies", "lru", "--prefetchers",
                 "none,next_gate,history", "--tokens", "30", "--json"])  # fmt: skip
    form = last_line(capsys.readouterr().out)
    rows = {row["what"]: row for row in form["rows"]}
    assert code in (0, 3) and form["bench"] == "paging nano" and "Zipf" in form["notes"][0]
    assert rows["60 %, lru, history: recall"]["value"] > 0
    assert rows["60 %, lru, none: faults"]["value"] > 0


def test_paging_beside_belady(tmp_path: Path, capsys: pytest.CaptureFixture[str], top: Path) -> None:
    text = (top / "data" / "validation" / "math.txt").read_text()
    (tmp_path / "math.txt").write_text(text[:600])
    code = main(["paging", "--text", str(tmp_path), "--budgets", "50", "--policies", "lru,lfru", "--prefetchers",
                 "none,next_gate", "--tokens", "12", "--json"])  # fmt: skip
    rows = {row["what"]: row for row in last_line(capsys.readouterr().out)["rows"]}
    assert code in (0, 3)
    forced = rows["50 %, belady, forced admission"]
    assert forced["value"] <= forced["limit"] == pytest.approx(rows["50 %, belady"]["value"])
    for policy in ("lru", "lfru"):
        rate = rows[f"50 %, {policy}, none: hit rate"]
        assert 0 < rate["value"] <= rate["limit"] == pytest.approx(forced["value"])
        wait = rows[f"50 %, {policy}, next_gate: I/O wait"]
        assert wait["peer"] == "none" and wait["unit"] == "ms/token" and wait["limit"] >= 0
        assert rows[f"50 %, {policy}, next_gate: recall"]["value"] > 50
        assert rows[f"math alone, 50 %, {policy}"]["share"] <= 1
    assert rows["math alone, 50 %, lfru: closes"]["value"] <= 100
    closed = 100 * (rate["value"] - rows["50 %, lru, none: hit rate"]["value"])
    closed /= forced["value"] - rows["50 %, lru, none: hit rate"]["value"]
    assert rows["50 %, lfru, none: closes"]["value"] == pytest.approx(closed)
