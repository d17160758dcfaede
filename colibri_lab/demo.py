"""`make demo`: the main job without a browser. Text from the embedded model under a small expert budget, the
performance line, and report.html with the pictures of the run inside.

    python -m colibri_lab.demo [--budget 2MiB] [--tokens 96] [--report report.html]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from colibri_lab.engine.engine import Engine
from colibri_lab.errors import ConfigError, RequestError
from colibri_lab.model.errors import ModelError
from colibri_lab.paths import embedded_model
from colibri_lab.performance import facts, performance, performance_line
from colibri_lab.view.report import report

PROMPTS = ("The young lady", "ROMEO.\nMy lord,", "def read(self", "Word: garden\n", "Count: 3, 6, 9,")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m colibri_lab.demo", description="Generate, measure, draw.")
    parser.add_argument("--budget", default="2MiB", help="memory for expert pages (all experts: 8MiB); default 2MiB")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each of the five texts; default 96")
    parser.add_argument("--report", type=Path, default=Path("report.html"), help="file to write; default report.html")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 done, 2 wrong input, 130 interrupted."""
    chosen = arguments(argv)
    try:
        with Engine.load(embedded_model(), expert_cache_bytes=chosen.budget) as engine:
            run(engine, chosen.tokens, chosen.report)
    except (ConfigError, RequestError, ModelError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def run(engine: Engine, tokens: int, out: Path) -> None:
    """One text for each domain that the model was trained on, then the figures and the page."""
    for what, fact in facts(engine.describe(), engine.settings):
        print(f"{what:9}{fact}")
    before, begin = engine.counters(), time.perf_counter()
    times: list[float] = []
    latencies: list[float] = []
    for prompt in PROMPTS:
        print(f"\n{'-' * 78}\n{prompt}", end="", flush=True)
        for token in engine.generate(prompt, max_tokens=tokens, temperature=0.7, top_p=0.95, seed=0):
            times.append(time.perf_counter())
            if token.index or not latencies:  # the first token of a text has waited for its prompt too
                latencies.append(token.latency_ms)
            print(token.text, end="", flush=True)
        print()
    done = performance(begin, times, latencies, engine.counters())
    print(f"{'-' * 78}\n{performance_line(done, before)}")
    print(f"report: {report(engine, out)}")


if __name__ == "__main__":
    sys.exit(main())
