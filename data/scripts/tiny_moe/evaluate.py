"""What the exported model can do, measured with transformers in float32: the figures of the card.

    python data/scripts/tiny_moe/evaluate.py [MODEL] [--work data/training] [--parts loss,routing,knockout,sums,samples]

Prints one JSON line for each part.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from random import Random
from typing import Any

import torch
from batches import load, mutual_information, validation_windows
from prep import DOMAINS
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = (
    "Emma was",
    '"My dear Mr. Bennet," said',
    "ROMEO.\n",
    "def read(self",
    "class Queue:\n",
    "Word: garden\n",
    "23 + 45 =",
    "Anna has 7 apples. Ben gives Anna 5 more.",
    "Count: 3, 6,",
)


class Evaluation:
    def __init__(self, folder: Path, work: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.ids = load(work / "ids", "val")
        config = self.model.config
        self.layers, self.experts, self.context = (
            config.num_hidden_layers,
            config.num_local_experts,
            config.max_position_embeddings,
        )

    def losses(self, x: Tensor) -> Tensor:
        """Nats of each token, [B, L]."""
        logits = self.model(x[:, :-1]).logits
        return functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].reshape(-1), reduction="none").view(len(x), -1)

    def characters(self, ids: Tensor) -> int:
        return len(self.tokenizer.decode(ids.flatten().tolist(), skip_special_tokens=True))

    def loss(self) -> dict[str, Any]:
        """Perplexity and bits per character by domain, for windows of 1024 and of 256 tokens."""
        found: dict[str, Any] = {}
        for domain in DOMAINS:
            row = {}
            for length, count in ((self.context, 24), (256, 80)):
                x = validation_windows(self.ids[domain], length, count)
                nll = torch.cat([self.losses(part) for part in x.split(4)])
                bits = nll.sum().item() / self.characters(x[:, 1:]) / math.log(2)
                row[str(length)] = {
                    "tokens": nll.numel(),
                    "nll": round(nll.mean().item(), 3),
                    "perplexity": round(math.exp(nll.mean().item()), 2),
                    "bits_per_character": round(bits, 3),
                }
            found[domain] = row
        return found

    def routing(self) -> dict[str, Any]:
        """How domains and tokens choose experts, by layer."""
        by_domain = torch.zeros(self.layers, len(DOMAINS), self.experts)
        by_token = torch.zeros(self.layers, self.model.config.vocab_size, self.experts)
        for row, domain in enumerate(DOMAINS):
            for x in validation_windows(self.ids[domain], self.context, 24).split(4):
                logits = self.model(x[:, :-1], output_router_logits=True).router_logits
                for layer, scores in enumerate(logits):
                    chosen = scores.reshape(-1, self.experts).topk(2, -1).indices
                    by_domain[layer, row] += torch.bincount(chosen.flatten(), minlength=self.experts)
                    hot = torch.zeros(len(chosen), self.experts).scatter_(1, chosen, 1.0)
                    by_token[layer].index_add_(0, x[:, :-1].reshape(-1), hot)
        even = by_domain / by_domain.sum(2, keepdim=True)  # every domain counts the same
        load_share = by_domain.sum(1) / by_domain.sum((1, 2), keepdim=False)[:, None]
        return {
            "information_domain_expert": [round(mutual_information(t), 3) for t in even],
            "information_token_expert": [round(mutual_information(t), 3) for t in by_token],
            "largest_load": [round(v, 3) for v in load_share.max(1).values.tolist()],
            "smallest_load": [round(v, 3) for v in load_share.min(1).values.tolist()],
        }

    def knockout(self) -> dict[str, Any]:
        """Change of loss when one expert of the last two layers is banned and the token takes its next choice."""
        x = torch.cat([validation_windows(self.ids[domain], 256, 8) for domain in DOMAINS])

        def by_domain() -> list[float]:
            return self.losses(x).view(len(DOMAINS), -1).mean(1).tolist()

        base, found = by_domain(), {}
        for layer in (self.layers - 2, self.layers - 1):
            gate = self.model.model.layers[layer].mlp.gate
            for expert in range(self.experts):
                gate.forward = banned(gate.weight, expert)
                change = [round(a - b, 3) for a, b in zip(by_domain(), base, strict=True)]
                found[f"{layer}.{expert}"] = dict(zip(DOMAINS, change, strict=True))
            del gate.forward
        return found

    def sums(self, count: int = 100) -> dict[str, float]:
        """Share of right answers to plain sums, greedy."""
        random, right = Random(5), {}
        signs = {"+": (0, 99), "-": (0, 99), "*": (0, 12)}
        for sign, span in signs.items():
            hits = 0
            for _ in range(count):
                b, a = sorted((random.randint(*span), random.randint(*span)))
                answer = self.generate(f"{a} {sign} {b} =", 4, sample=False)
                found = re.match(r"\s*(\d+)", answer)
                hits += bool(found) and int(found[1]) == {"+": a + b, "-": a - b, "*": a * b}[sign]
            right[sign] = hits / count
        return right

    def samples(self) -> dict[str, str]:
        """110 tokens from each prompt at temperature 0.7, top-p 0.95, seed 0."""
        return {prompt: self.generate(prompt, 110, sample=True) for prompt in PROMPTS}

    def generate(self, prompt: str, tokens: int, sample: bool) -> str:
        torch.manual_seed(0)
        inputs = self.tokenizer(prompt, return_tensors="pt")
        how = {"do_sample": True, "temperature": 0.7, "top_p": 0.95} if sample else {"do_sample": False}
        out = self.model.generate(**inputs, max_new_tokens=tokens, pad_token_id=2, **how)[0]
        return str(self.tokenizer.decode(out, skip_special_tokens=True))[len(prompt) :]


def banned(weight: Tensor, expert: int) -> Any:
    """A router's forward that never chooses `expert`; the gate weights stay those of all experts' softmax."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), weight)
        masked = logits.clone()
        masked[:, expert] = -1e9
        chosen = masked.topk(2, -1).indices
        kept = logits.softmax(-1).gather(1, chosen)
        return logits, kept / kept.sum(-1, keepdim=True), chosen

    return forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=Path("data/tiny-moe"), help="exported folder")
    parser.add_argument("--work", type=Path, default=Path("data/training"), help="folder of tokenizer.py")
    parser.add_argument("--parts", default="loss,routing,knockout,sums,samples", help="which parts, with commas")
    chosen = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        evaluation = Evaluation(chosen.model, chosen.work)
        for part in chosen.parts.split(","):
            print(json.dumps({part: getattr(evaluation, part)()}), flush=True)


if __name__ == "__main__":
    main()
