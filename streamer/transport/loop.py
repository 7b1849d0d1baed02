"""An event loop in a thread of its own, for callers that are not coroutines or whose loop is busy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, TypeVar

from streamer.errors import MissingDependencyError, SourceError, StreamError

__all__ = ["LoopThread"]

T = TypeVar("T")


class _End:
    """Marks the end of a stream; carries its error, if any."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


class LoopThread:
    """Runs coroutines for synchronous code; a context manager.

    Works whether or not the calling thread has a running loop, because it never uses that one. After
    ``os.fork`` the child has no such thread: using the object there raises, leaving it does nothing, and
    neither hangs.
    """

    def __init__(self, *, use_uvloop: bool = False) -> None:
        self._pid = os.getpid()
        try:
            self._loop = _new_loop(use_uvloop)
        except OSError as error:
            raise SourceError(
                f"no event loop could be made: {error.strerror}", hint="raise the limit of open files (ulimit -n)"
            ) from error
        self._thread = threading.Thread(target=self._run, name="s3stream-loop", daemon=True)
        self._thread.start()

    @property
    def thread_id(self) -> int:
        """Of the thread, as `threading.get_ident` returns it there."""
        assert self._thread.ident is not None
        return self._thread.ident

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, before: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what still runs, wait for it, run `before` in the loop, and end the thread."""
        if self._pid != os.getpid() or self._loop.is_closed():
            return
        try:
            asyncio.run_coroutine_threadsafe(_wind_down(before), self._loop).result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise StreamError(
                "this loader was opened before a fork and cannot be used in the child process",
                hint="open a new one in the child",
            )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` to its end and return its result; an interrupt of the caller cancels it."""
        try:
            self._check_process()
        except StreamError:
            coroutine.close()
            raise
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def interrupt(self) -> None:
        """Cancel what runs now, and wait until it has ended."""
        self.run(_cancel_others())

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run `callback` in the loop's thread, soon."""
        self._loop.call_soon_threadsafe(callback)

    def iterate(
        self, open_items: Callable[[], contextlib.AbstractAsyncContextManager[AsyncIterator[T]]]
    ) -> Generator[T, None, None]:
        """Iterate, in the calling thread, over what a context manager yields in the loop's thread.

        Items are passed on as soon as they exist; holding back is the business of `open_items`. Closing
        the iterator early leaves the context manager and waits until it is left.
        """
        self._check_process()

        async def pump(items: queue.SimpleQueue[T | _End]) -> None:
            async with open_items() as stream:
                async for item in stream:
                    items.put(item)

        return self._drain(pump)

    def _drain(
        self, pump: Callable[[queue.SimpleQueue[T | _End]], Coroutine[Any, Any, None]]
    ) -> Generator[T, None, None]:
        items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        tasks: list[asyncio.Task[None]] = []

        def start() -> None:
            task = self._loop.create_task(pump(items))
            tasks.append(task)
            # A done callback also runs for a task that is cancelled before its first step.
            task.add_done_callback(lambda done: items.put(_End(None if done.cancelled() else done.exception())))

        self._loop.call_soon_threadsafe(start)
        end: _End | None = None
        try:
            while True:
                item = items.get()
                if isinstance(item, _End):
                    end = item
                    break
                yield item
        finally:
            if end is None and self._pid == os.getpid():
                if not self._loop.is_closed():
                    self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                while not isinstance(items.get(), _End):
                    pass
        if end.error is not None:
            raise end.error


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _wind_down(before: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
    await _cancel_others()
    if before is not None:
        await before()
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    # Aborted transports close their sockets in callbacks of their own; let them.
    await asyncio.sleep(0)


def _new_loop(use_uvloop: bool) -> asyncio.AbstractEventLoop:
    if not use_uvloop:
        return asyncio.new_event_loop()
    try:
        import uvloop
    except ImportError as error:
        raise MissingDependencyError(
            "use_uvloop is set, but uvloop is not installed", hint="pip install uvloop"
        ) from error
    return uvloop.new_event_loop()
