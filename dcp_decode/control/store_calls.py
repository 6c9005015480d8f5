"""The calls of a control store, made where they can be waited for with a deadline.

A TCPStore's constructor, `check`, `get`, `set` and `append` read the answer without any timeout: with its host stopped
each of them waits for ever, whatever `set_timeout` says (seen with torch 2.13). So one daemon thread makes them, in
order, and whoever wants an answer waits for that as long as it has time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class StoreCalls:
    """Makes one call after the other. A call without an answer holds up those behind it, never their callers."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        # A daemon: a process that ends doesn't wait for a store that is silent.
        threading.Thread(target=self._make, name="control store", daemon=True).start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """The answer to come, or the error of the call."""
        answer: Future[T] = Future()
        self._requests.put((answer, call))
        return answer

    def _make(self) -> None:
        while True:
            answer, call = self._requests.get()
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
            del answer, call  # else the store that they hold would live until the next call
