"""The child's end of a peer: it answers one JSON line with one JSON line. Standard library alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Op = Callable[..., dict[str, Any]]


def serve(requests: TextIO, answers: TextIO, load: Callable[..., Any], ops: Mapping[str, Op]) -> None:
    """Answer requests until `close` or the end of input; an error becomes {"error": text}.

    `load` makes what all other requests but `ops` are methods of; its attribute `settings` is the answer.
    """
    loaded: Any = None
    for line in requests:
        request = json.loads(line)
        what = request.pop("op")
        answer: dict[str, Any]
        try:
            if what == "close":
                return
            if what == "load":
                loaded = load(**request)
                answer = {"settings": loaded.settings}
            else:
                answer = (ops[what] if what in ops else getattr(loaded, what))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "missing": isinstance(error, ImportError)}
        print(json.dumps(answer), file=answers, flush=True)


def child(load: Callable[..., Any], ops: Mapping[str, Op]) -> None:
    """`serve` on the standard streams of a process of its own."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    serve(sys.stdin, answers, load, ops)
