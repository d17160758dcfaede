"""Makes the goldens with transformers (extra `oracle`), or makes them afresh and compares.

    python -m tests.oracle.make_goldens            # write tests/oracle/goldens
    python -m tests.oracle.make_goldens --check    # make afresh and compare: what `make test-oracle` runs

transformers runs in float32 on one thread. Every checkpoint is also run through the float64 NumPy oracle, which must
agree to 1e-5, so that a golden rests on two independent readings.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.makers import Checkpoint

from . import embedded
from .goldens import FOLDER, LEAST_MARGIN, LEAST_ROUTING, NEW_TOKENS, error, load, prompts
from .numpy_oracle import Oracle
from .settings import SETTINGS, Setting

Arrays = dict[str, np.ndarray[Any, Any]]


def load_transformers(folder: Path) -> Any:
    """The model in float32, eager attention, every tensor accounted for."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    loose = {kind: sorted(names) for kind, names in info.items() if names}
    if loose:
        raise AssertionError(f"transformers did not take {folder} whole: {loose}")
    return model.eval()


def logits_of(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    import torch

    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].float().numpy()


def greedy_of(model: Any, ids: list[int], count: int, least: float) -> tuple[list[int], float]:
    """(greedy tokens with transformers' own cache, least relative margin); without the cache the same must come."""
    import torch

    tokens, margin, cache, step = [], np.inf, None, torch.tensor([ids])
    with torch.no_grad():
        for _ in range(count):
            out = model(step, cache=cache, use_cache=True)
            cache, logits = out.cache, out.logits[0, -1].float().numpy()
            second, first = np.sort(logits)[-2:]
            margin = min(margin, float((first - second) / np.abs(logits).max()))
            tokens.append(int(logits.argmax()))
            step = torch.tensor([[tokens[-1]]])
    whole = logits_of(model, ids + tokens[:-1])[len(ids) - 1 :].argmax(1).tolist()
    if whole != tokens:
        raise AssertionError("transformers' cache changes its own greedy tokens")
    if margin <= least:
        raise AssertionError(
            f"greedy margin {margin:.1e} is at most {least:.0e}: 64 tokens would hang on rounding; take another seed"
        )
    return tokens, margin


def find_seed(setting: Setting) -> int:
    """The first seed whose greedy run has healthy margins and more than one kind of token, by the NumPy oracle."""
    for seed in range(400):
        made = setting.checkpoint(seed)
        oracle, good = Oracle(made.config, made.tensors), True
        for prompt in prompts(setting, made.config["vocab_size"]):
            tokens, margin, routed = oracle.greedy(prompt, NEW_TOKENS)
            good = good and margin > 1.5 * LEAST_MARGIN and routed > 1.5 * LEAST_ROUTING and len(set(tokens)) > 5
        if good:
            return seed
    raise AssertionError(f"no seed of 400 gives {setting.key} healthy margins")


def make_one(setting: Setting, seed: int) -> Arrays:
    """One setting's golden arrays, checked against the NumPy oracle."""
    made: Checkpoint = setting.checkpoint(seed)
    arrays: Arrays = {"seed": np.array(seed), "hash": np.array(made.hash)}
    oracle = Oracle(made.config, made.tensors)
    with tempfile.TemporaryDirectory() as folder:
        model = load_transformers(made.save(folder))
        for i, prompt in enumerate(prompts(setting, made.config["vocab_size"])):
            logits, right = logits_of(model, prompt), oracle.logits(prompt)
            if error(logits, right) > 1e-5:
                raise AssertionError(
                    f"{setting.key}: transformers and the NumPy oracle differ by {error(logits, right):.1e}"
                )
            tokens, _ = greedy_of(model, prompt, NEW_TOKENS, LEAST_MARGIN)
            arrays |= {f"prompt{i}": np.array(prompt), f"logits{i}": logits, f"tokens{i}": np.array(tokens)}
    return arrays


def same(key: str, fresh: Arrays) -> float:
    """Largest relative error of the committed golden against a fresh one; tokens must be equal."""
    old, worst = load(key), 0.0
    if old.hash != str(fresh["hash"]):
        raise AssertionError(f"{key}: the maker's checkpoint has changed")
    for i, run in enumerate(old.runs):
        if run.tokens != fresh[f"tokens{i}"].tolist() or run.prompt != fresh[f"prompt{i}"].tolist():
            raise AssertionError(f"{key}: tokens differ from the committed golden")
        worst = max(worst, error(run.logits, fresh[f"logits{i}"]))
    if worst > 1e-5:
        raise AssertionError(f"{key}: logits differ from the committed golden by {worst:.1e}")
    return worst


def save(path: Path, arrays: Arrays) -> None:
    path.parent.mkdir(exist_ok=True)
    np.savez_compressed(path, **arrays)
    print(
        f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed goldens and write nothing")
    parser.add_argument("--only", default="", help="family names or 'embedded', comma separated")
    args = parser.parse_args()
    only = args.only.split(",") if args.only else ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "embedded"]
    for family in [name for name in only if name != "embedded"]:
        arrays: Arrays = {}
        for key, setting in SETTINGS.items():
            if setting.family != family:
                continue
            seed = load(key).seed if args.check else find_seed(setting)
            fresh = make_one(setting, seed)
            note = f"error {same(key, fresh):.1e}" if args.check else "made"
            print(f"{key}: seed {seed} {note}", flush=True)
            arrays |= {f"{key}/{name}": value for name, value in fresh.items()}
        if not args.check:
            save(FOLDER / f"{family}.npz", arrays)
    if "embedded" in only:
        embedded_arrays = embedded.make(load_transformers, logits_of, greedy_of)
        if args.check:
            print(f"embedded: error {embedded.same(embedded_arrays):.1e}")
        else:
            save(FOLDER / "embedded.npz", embedded_arrays)
    return 0


if __name__ == "__main__":
    sys.exit(main())
