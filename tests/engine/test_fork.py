"""A second engine for nothing: a forked child may use its copy or let it go, and other copies are refused."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
from collections.abc import Callable

import pytest

from colibri_lab.engine import Engine

from .conftest import Load

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork")  # Python 3.12 says so, and it is the point


def generate(engine: Engine) -> None:
    assert len(list(engine.generate("The sea", max_tokens=5))) == 5


@pytest.mark.parametrize("use", [Engine.close, generate])
def test_in_a_forked_child(load: Load, use: Callable[[Engine], None]) -> None:
    engine = load(threads=2, expert_cache_bytes="1MiB")
    generate(engine)
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends the child, should it wait for threads that only its parent has
        try:
            use(engine)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    generate(engine)


def test_copies_are_refused_and_close_nothing(load: Load) -> None:
    engine = load()
    for copies in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="load the model again"):
            copies(engine)
    gc.collect()
    generate(engine)
