"""Step 4 of 5: train, one single-thread process for each core.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 \\
        torchrun --nproc_per_node 2 data/scripts/tiny_moe/train.py --minutes 41

The learning rate follows the clock: warm-up, constant to 40 % of the time, then linear to 2 %. Another machine sees
another number of steps in the same time; weights are not reproducible bit by bit. Writes <work>/run/checkpoint.pt and a
log of each process.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from batches import Batches, load, mutual_information, validation_windows
from model import Config, LanguageModel
from optimiser import Exchange, Muon, is_matrix
from prep import DOMAINS
from torch import Tensor
from torch import distributed as dist

LONG_FROM = 0.35  # share of the time after which every third step has windows of the whole context
DECAY_FROM = 0.4
WARM_UP = 60  # steps
BALANCE, Z_LOSS = 0.01, 1e-4
LONG_BALANCE = 0.3  # of BALANCE: long steps have few windows, so an even load asks too much of them
RATE_MUON, RATE_ADAM = 0.02, 3e-3


def rate(step: int, clock: float) -> float:
    """Factor of the learning rates; clock is the share of the time that has passed."""
    decay = 1.0 if clock < DECAY_FROM else max(0.02, (1 - clock) / (1 - DECAY_FROM))
    return min(1.0, (step + 1) / WARM_UP) * decay


def evaluate(model: LanguageModel, windows: dict[str, Tensor]) -> dict[str, Any]:
    """Validation loss by domain, and bits of information between domain and expert by layer."""
    losses = {}
    layers, experts = len(model.blocks), model.blocks[0].moe.experts
    counts = torch.zeros(layers, len(DOMAINS), experts)
    for row, domain in enumerate(DOMAINS):
        parts = []
        for x in windows[domain].split(12):
            parts.append(model.token_losses(x[:, :-1], x[:, 1:]).flatten())
            for layer, block in enumerate(model.blocks):
                counts[layer, row] += torch.bincount(block.moe.chosen.flatten(), minlength=experts)
        losses[domain] = round(torch.cat(parts).mean().item(), 3)
    shares = counts / counts.sum(2, keepdim=True)
    return {"nll": losses, "information": [round(mutual_information(table), 3) for table in shares]}


def save(path: Path, model: LanguageModel, config: Config, facts: dict[str, Any]) -> None:
    torch.save({"config": asdict(config), "weights": model.state_dict(), **facts}, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("data/training"), help="folder of tokenizer.py")
    parser.add_argument("--minutes", type=float, default=41.0)
    parser.add_argument("--steps", type=int, default=10**9, help="stop after so many steps")
    parser.add_argument("--short", type=int, default=256, help="tokens of a short window")
    parser.add_argument("--print-every", type=int, default=50)
    parser.add_argument("--evaluate-every", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    chosen = arguments()
    start = time.time()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(chosen.seed)
    config = Config()
    batches = Batches(load(chosen.work / "ids", "train"), rank, chosen.seed, chosen.short, config.context)
    held_out = load(chosen.work / "ids", "val")
    windows = {domain: validation_windows(ids, chosen.short, 24) for domain, ids in held_out.items()}
    model = LanguageModel(config)
    muon = Muon(model, config, rank, world)
    others = [p for name, p in model.named_parameters() if not is_matrix(name)]
    adam = torch.optim.AdamW(others, lr=RATE_ADAM, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    exchange = Exchange(list(model.parameters()), world)
    out = chosen.work / "run"
    out.mkdir(parents=True, exist_ok=True)
    tokens_a_step = batches.tokens * world
    step, long_steps, clock, recent, since = 0, 0, 0.0, [], time.time()

    def report(log: Any, final: bool) -> None:
        facts = {"step": step, "long_steps": long_steps, "tokens": step * tokens_a_step, "seconds": time.time() - start}
        line = {**facts, **evaluate(model, windows), "final": final}
        print(json.dumps(line), flush=True)
        log.write(json.dumps(line) + "\n")
        save(out / "checkpoint.pt", model, config, facts)

    with (out / f"log{rank}.jsonl").open("w") as log:
        while step < chosen.steps and clock < 1:
            long = clock >= LONG_FROM and step % 3 == 0
            x = batches.next(long)
            loss = model(x[:, :-1], x[:, 1:])
            balance = sum(block.moe.balance for block in model.blocks) * (LONG_BALANCE if long else 1.0)
            z_loss = sum(block.moe.z_loss for block in model.blocks) / config.layers
            (loss + BALANCE * balance + Z_LOSS * z_loss).backward()
            clock = exchange.average((time.time() - start) / (60 * chosen.minutes))
            factor = rate(step, clock)
            for group in adam.param_groups:
                group["lr"] = RATE_ADAM * factor
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            muon.step(RATE_MUON * factor)
            adam.step()
            model.zero_grad(set_to_none=True)
            step, long_steps = step + 1, long_steps + long
            recent.append(loss.item())
            if rank == 0 and step % chosen.print_every == 0:
                speed = chosen.print_every * tokens_a_step / (time.time() - since)
                print(f"{step} loss {sum(recent) / len(recent):.3f} rate {factor:.3f} {speed:.0f} tokens/s", flush=True)
                recent, since = [], time.time()
            if rank == 0 and step % chosen.evaluate_every == 0:
                report(log, final=False)
        if rank == 0:
            report(log, final=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
