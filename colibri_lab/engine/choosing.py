"""The tokens of a step: from logits on the host, or on the GPU, where the logits then stay.

Both give the same text. The random number of a draw is the request's own and is taken on the host; the GPU says of each
token whether it is surely the sampler's (kernels/cuda/sample.cu), and where it is not, that row's logits come and the
sampler chooses with the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model.transformer import Transformer
from ..ops.cuda import CudaBackend
from ..ops.cuda_sample import Draw
from ..ops.types import Backend
from .sampling import Sampler, log_probability, share, whole
from .sequence import Request, Work

Token = tuple[int, float]  # id, natural log of its probability


class Choosing:
    """On the host."""

    def choose(self, t: Transformer, works: Sequence[Work], listed: bool) -> list[Token | None]:
        """The head, and a token of each work that ends in one, else None. listed: whether others want to see the logits
        (transformer.rows.logits) afterwards."""
        outs = out_rows(works)
        if outs:
            t.head(outs)
        tokens = iter([self._on_host(t, i, request) for i, request in enumerate(_ending(works))])
        return [next(tokens) if work.last else None for work in works]

    def counters(self) -> dict[str, int]:
        return {}

    @staticmethod
    def _on_host(t: Transformer, i: int, request: Request) -> Token:
        rows, sampler = t.rows, request.sampler
        id = int(rows.argmax[i]) if sampler.plain else sampler.choose(rows.logits[i])
        return id, log_probability(rows.logits[i], id, float(rows.logsumexp[i]))


class DeviceChoosing(Choosing):
    """On the GPU, unless the logits are wanted on the host anyway."""

    def __init__(self, backend: CudaBackend) -> None:
        self._backend = backend
        self._seated: dict[int, Request] = {}  # seat -> whose tokens the device knows to be seen
        self._chosen = self._unsure = self._listed = self._wide = 0

    def choose(self, t: Transformer, works: Sequence[Work], listed: bool) -> list[Token | None]:
        """See Choosing."""
        outs, requests = out_rows(works), _ending(works)
        if listed or self._backend.chooser is None:
            self._listed, self._wide = self._listed + listed * len(outs), self._wide + (not listed) * len(outs)
            for request in requests:
                self._seated.pop(request.seat, None)  # what is seen from here on, the device does not know
            return super().choose(t, works, listed)
        if not outs:
            return [None] * len(works)
        t.rows.out_row[: len(outs)] = outs
        self._backend.score(len(outs))
        if all(request.sampler.plain for request in requests):
            rows = t.rows
            found = [(int(rows.argmax[i]), float(self._backend.largest[i])) for i in range(len(outs))]
            self._chosen += len(outs)
        else:
            found = self._drawn(t, requests)
        tokens = iter([(id, share(v, float(t.rows.logsumexp[i]))) for i, (id, v) in enumerate(found)])
        return [next(tokens) if work.last else None for work in works]

    def _drawn(self, t: Transformer, requests: Sequence[Request]) -> list[tuple[int, float]]:
        """(id, its logit) of each request."""
        assert self._backend.chooser is not None
        for request in requests:
            seen = request.sampler.seen
            if seen is not None and self._seated.get(request.seat) is not request:
                self._backend.chooser.begin(request.seat, seen)
                self._seated[request.seat] = request
        draws = [drawn(request.sampler) for request in requests]
        ids, sure, values = self._backend.choose([request.seat for request in requests], draws)
        found = []
        for i, (request, draw) in enumerate(zip(requests, draws, strict=True)):
            id, value = int(ids[i]), float(values[i])
            if sure[i]:
                request.sampler.saw(id)
                self._chosen += 1
            else:
                self._backend.read_logits(i)
                self._unsure += 1
                self._seated.pop(request.seat, None)
                logits, sampler = t.rows.logits[i], request.sampler
                id = int(t.rows.argmax[i]) if sampler.plain else sampler.choose(logits, draw.random)
                value = float(logits[id])
            found.append((id, value))
        return found

    def counters(self) -> dict[str, int]:
        """Tokens chosen on the GPU; where it was not sure; and left to the host because the logits were wanted there
        (telemetry_top_logprobs), or because the vocabulary is too large for the kernel's sums."""
        return {
            "tokens_chosen": self._chosen,
            "tokens_unsure": self._unsure,
            "tokens_listed": self._listed,
            "tokens_too_wide": self._wide,
        }


def choosing_for(backend: Backend) -> Choosing:
    """On the device where there is one."""
    return DeviceChoosing(backend) if isinstance(backend, CudaBackend) else Choosing()


def drawn(sampler: Sampler) -> Draw:
    """A sampler's rules and its next random number, as the kernel takes them."""
    how, top_k = sampler.how, whole(sampler.how.top_k) or 0
    return Draw(float(how.temperature), min(top_k, (1 << 31) - 1), float(how.top_p), float(how.min_p),
                float(how.repetition_penalty), sampler.number())  # fmt: skip


def out_rows(works: Sequence[Work]) -> list[int]:
    """The rows of a step that end in a token."""
    outs, row = [], -1
    for work in works:
        row += work.count
        if work.last:
            outs.append(row)
    return outs


def _ending(works: Sequence[Work]) -> list[Request]:
    return [work.sequence for work in works if work.last]
