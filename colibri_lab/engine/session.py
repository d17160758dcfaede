"""Generation in a worker thread, for the lab: start returns at once; pause, resume and stop act between tokens."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from .request import Asked
from .sequence import Request, Token

if TYPE_CHECKING:
    from .engine import Engine


class Session:
    """One generation at a time; `text` and `tokens` grow. `state`: idle, generating, paused, stopping or error."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.text = ""
        self.tokens: list[Token] = []
        self.error: BaseException | None = None
        self._change, self._starting = threading.Condition(), threading.Lock()
        self._state = "idle"
        self._request: Request | None = None
        self._closed = False
        self._thread: threading.Thread | None = None

    @property
    def state(self) -> str:
        """idle, generating, paused, stopping or error."""
        return self._state

    @property
    def sequence(self) -> int | None:
        """The number of the running or last request, as the events name it; None before the first."""
        request = self._request
        return None if request is None else request.number

    def start(self, prompt: Any, max_tokens: int = 128, **sampling: Any) -> None:
        """Begin to generate; a running generation is stopped first. Wrong arguments raise here."""
        request, tokens = self.engine.begin(prompt, Asked(max_tokens, **sampling))
        with self._starting:  # two threads that start at once: the later one replaces the earlier
            self.stop()
            self.join()
            with self._change:
                if self._closed:
                    raise RuntimeError("the session is closed")
                self.text, self.tokens, self.error = "", [], None
                self._state, self._request = "generating", request
                # A fresh thread for each generation: it starts at a shallow stack, which CPython 3.11 runs fastest.
                self._thread = threading.Thread(target=self._run, args=(tokens,), name="colibri-session", daemon=True)
                self._thread.start()

    def pause(self) -> None:
        """Hold generation before the next token; nothing happens unless it is generating."""
        self._go("generating", "paused")

    def resume(self) -> None:
        """Go on after a pause."""
        self._go("paused", "generating")

    def stop(self) -> None:
        """End generation after the token under way; the text so far stays."""
        with self._change:
            if self._state in ("generating", "paused"):
                self._state = "stopping"
                if self._request is not None:
                    self._request.cancelled = True
                self._change.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the generation to end (a paused one does not); True when it has."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
            return not thread.is_alive()
        return True

    def set(self, name: str, value: Any) -> None:
        """Write a live setting of the engine."""
        self.engine.settings.set(**{name: value})

    def close(self) -> None:
        """Stop and end the thread; idempotent."""
        with self._change:
            self._closed = True
        self.stop()
        self.join()

    def _go(self, before: str, after: str) -> None:
        with self._change:
            if self._state == before:
                self._state = after
                self._change.notify_all()

    def _run(self, tokens: Any) -> None:
        try:
            for token in tokens:
                if (
                    not self._may_go_on()
                ):  # asked before it is shown: a pause takes hold of a token that waits for its pace
                    break
                self.tokens.append(token)
                self.text += token.text
        except BaseException as error:
            self.error = error
        finally:
            tokens.close()
            with self._change:
                self._state = "idle" if self.error is None else "error"
                self._change.notify_all()

    def _may_go_on(self) -> bool:
        with self._change:
            while self._state == "paused":
                self._change.wait()
            return self._state == "generating"

    def _repr_html_(self) -> str:
        from html import escape

        head = f"<p><b>{escape(self._state)}</b>, {len(self.tokens)} tokens</p>"
        return f"{head}<pre style='white-space:pre-wrap'>{escape(self.text)}</pre>"
