"""Carries the asynchronous core out for a caller that blocks: on one event loop, in a thread of its own.

Idea: whoever calls waits for the loop's thread, and runs nothing of the core itself. So the blocking face works in any
thread, also in one that runs an event loop of its own, and heartbeats go on while an agent blocks.

- An interrupt (Ctrl-C) of a caller that waits cancels what it waits for, and waits until that has ended. A second one
  is not waited for.
- A fork stops the loop for a moment, so that a process is forked with as few threads as it has without the SDK. The
  child begins a loop of its own when it first needs one.
- The thread is a daemon: it keeps no program alive. While the interpreter ends (`atexit`) no thread can be begun, and
  at last this one stands still. Then the loop runs in the caller's.
- What the loop's own thread calls, as a destructor may be, cannot be waited for: that is an error.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from ajet_sdk import client
from ajet_sdk.client import DEADLINE_S, Reply, Target

if TYPE_CHECKING:
    import asyncio

P = ParamSpec("P")
T = TypeVar("T")
HEARD_S = 1.0
"""A signal that comes as a wait begins, or to another thread, wakes no wait: it is heard when that ends."""

END_S = 1.0
"""A thread that has returned ends within this time."""


def nothing() -> None:
    """Does nothing."""


class LoopThread:
    """An event loop in a thread of its own, begun when it is first needed."""

    def __init__(self) -> None:
        self._begin_anew()
        with suppress(RuntimeError):  # the main thread has ended
            import_module("concurrent.futures.thread")  # its hooks and those of logging lock what our thread may need
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(
                before=self._pause, after_in_parent=self._go_on, after_in_child=self._begin_anew,
            )  # fmt: skip

    def _begin_anew(self) -> None:
        self._kept = [*getattr(self, "_kept", ()), getattr(self, "_loop", None)]
        """Loops that run elsewhere, as the parent process's: their end would close what is still used there."""
        self._lock = threading.RLock()  # a destructor or a signal may call at any place
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._paused = False

    @property
    def is_here(self) -> bool:
        """True in the loop's own thread."""
        return threading.current_thread() is self._thread

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> tuple[asyncio.Task[Any], concurrent.futures.Future[T]]:
        """Begins to carry `coroutine` out: its task, and what comes of it. `RuntimeError` if no thread can do so."""
        if sys.is_finalizing():
            raise RuntimeError("no thread goes on while the interpreter ends")
        ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        begun: concurrent.futures.Future[asyncio.Task[Any]] = concurrent.futures.Future()
        with self._lock:
            loop = self._loop = self._loop or _new_loop()
            if self._thread is None:
                self._start(loop)
            loop.call_soon_threadsafe(lambda: begun.set_result(loop.create_task(_carried_out(coroutine, ended))))
        return begun.result(), ended

    async def carry(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Carries `coroutine` out by this loop, for one that any loop runs. So it goes on while that other is blocked.
        Where no thread can be begun, it is carried out by the caller's."""
        import asyncio

        if asyncio.get_running_loop() is self._loop:
            return await coroutine
        try:
            task, ended = self.begin(coroutine)
        except RuntimeError:
            return await coroutine
        done = asyncio.wrap_future(ended)
        done.add_done_callback(asyncio.Future.exception)  # nobody else asks for that of a caller who was cancelled
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            task.get_loop().call_soon_threadsafe(task.cancel)
            await asyncio.wait([done])
            raise
        return done.result()

    def here(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Carries `coroutine` out in this thread, where no other one can be begun."""
        with self._lock:
            if sys.is_finalizing() and self._loop is not None and self._loop.is_running():
                self._kept.append(self._loop)  # its thread stands still
                self._loop = None
            self._loop = self._loop or _new_loop()
            return self._loop.run_until_complete(coroutine)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._paused = False
        thread = threading.Thread(target=self._go_round, args=(loop,), name="ajet", daemon=True)
        thread.start()
        self._thread = thread

    def _go_round(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs the loop until it is paused. What would end it, as ``sys.exit`` in a callback does, is the result of the
        task that raised it, and concerns nobody else. Even one that is paused as it begins has begun what was asked."""
        while True:
            with suppress(KeyboardInterrupt, SystemExit):
                loop.run_forever()
            if self._paused:
                return

    def _pause(self) -> None:
        """Ends the thread, and leaves the loop as it is; nothing is begun until `_go_on`."""
        self._lock.acquire()
        if self._thread is not None and self._loop is not None:
            self._paused = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            _await_end(self._thread)
            self._thread = None

    def _go_on(self) -> None:
        """Goes on with what the loop had to do, if it had anything."""
        if self._loop is not None:
            from asyncio import all_tasks

            if all_tasks(self._loop):
                self._start(self._loop)
        self._lock.release()


def _await_end(thread: threading.Thread) -> None:
    """Waits until the system has ended `thread`, too. In its last moments it holds locks of OpenSSL, and a process that
    is forked then would wait for them forever."""
    until = time.monotonic() + END_S
    while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < until:
        time.sleep(0.0001)


def _new_loop() -> asyncio.AbstractEventLoop:
    import asyncio
    import socket

    class Loop(asyncio.SelectorEventLoop):
        """Asks for addresses by itself, where no thread can be begun that does."""

        async def getaddrinfo(self, *args: Any, **more: Any) -> Any:
            try:
                return await super().getaddrinfo(*args, **more)
            except RuntimeError:
                return socket.getaddrinfo(*args, **more)

    return Loop()


async def _carried_out(coroutine: Coroutine[Any, Any, T], ended: concurrent.futures.Future[T]) -> None:
    """Carries `coroutine` out. Whatever it raises is for the caller alone: nothing of it ends the loop."""
    try:
        ended.set_result(await coroutine)
    except BaseException as error:
        ended.set_exception(error)


LOOP = LoopThread()


def wait(coroutine: Coroutine[Any, Any, T], interrupted: Callable[[], None] = nothing) -> T:
    """Has `coroutine` carried out by the loop, and returns or raises what comes of it. `interrupted` is called by this
    thread on an interrupt, before what runs is cancelled."""
    if LOOP.is_here:
        coroutine.close()
        raise RuntimeError("the blocking SDK was called by the thread that carries it out")
    try:
        task, ended = LOOP.begin(coroutine)
    except RuntimeError:
        return LOOP.here(coroutine)
    try:
        _until(ended)
    except BaseException:
        if not ended.done():
            try:
                interrupted()
            finally:
                task.get_loop().call_soon_threadsafe(task.cancel)
            _until(ended)
        raise
    return ended.result()


def at_home(operation: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """`operation`, carried out by `LOOP`, whichever loop asks for it."""

    @wraps(operation)
    async def carried(*args: P.args, **more: P.kwargs) -> T:
        return await LOOP.carry(operation(*args, **more))

    return carried


def _until(ended: concurrent.futures.Future[Any]) -> None:
    """Waits for an end, and wakes up now and then to hear signals."""
    while not concurrent.futures.wait([ended], HEARD_S).done:
        pass


def shown_as(operation: Callable[..., Any], method: Callable[P, T]) -> Callable[P, T]:
    """`method` with the name, docstring and parameters of the `operation` that it carries out."""
    method.__name__ = method.__qualname__ = operation.__name__.removeprefix("_")
    method.__doc__ = operation.__doc__
    method.__signature__ = signature(operation)  # type: ignore[attr-defined]
    return method


def blocking(operation: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """The function that carries `operation` out and waits for it."""

    def function(*args: P.args, **more: P.kwargs) -> T:
        return wait(operation(*args, **more))

    return shown_as(operation, function)


class Client:
    """A connection to one proxy's control plane. Threads may share it, and it survives a fork.

    `proxy_url` and `api_key` default to the environment's (see `Target.resolve`). `deadline`, in seconds, bounds how
    long each operation may try to be acknowledged. A client that was closed makes new connections if it is used again.
    """

    def __init__(
        self, proxy_url: str | None = None, api_key: str | None = None, *, deadline: float = DEADLINE_S
    ) -> None:
        self.core = client.Client(proxy_url, api_key, deadline=deadline)

    @property
    def target(self) -> Target:
        """Where the proxy is."""
        return self.core.target

    def ask(self, name: str, body: Any = None, *, id: str | None = None, **query: Any) -> Reply:
        """The acknowledged answer of the route called `name` in `ajet_sdk.routes.ROUTES`; `body` is its dataclass."""
        return wait(self.core.ask(name, body, id=id, **query))

    def close(self) -> None:
        """Lets go of the connections."""
        if self.core.used:
            wait(self.core.aclose())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
