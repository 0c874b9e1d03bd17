"""A process for each case, forked from one that has imported torch but not touched the device."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

Target = Callable[..., None]


class Processes:
    """Runs targets one after the other, each in a fresh process.

    Importing torch and Lightning takes seconds; a fork server does so once. Where the device cannot be used
    after a fork, processes are spawned from then on.

    Args:
        preload: modules that the fork server imports.
        method: ``forkserver`` or ``spawn``.
    """

    def __init__(self, preload: list[str], method: str = "forkserver") -> None:
        # Else asking for a GPU, which imports may do, starts the driver in the server, and forks are lost.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        self.preload, self.method, self._works = preload, method, False

    def run(self, target: Target, *arguments: Any, timeout_s: float) -> Any:
        """What the target sends through the connection that it gets as its last argument.

        A text is an error's. So is what this returns for a process that dies or takes too long.
        """
        answer = self._run(target, arguments, timeout_s)
        if isinstance(answer, str) and self.method == "forkserver" and not self._works:
            self.method = "spawn"
            answer = self._run(target, arguments, timeout_s)
        self._works |= not isinstance(answer, str)
        return answer

    def _run(self, target: Target, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        context = multiprocessing.get_context(self.method)
        if self.method == "forkserver":
            context.set_forkserver_preload(self.preload)
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=target, args=(*arguments, there))  # type: ignore[attr-defined]
        process.start()
        there.close()
        try:
            if not here.poll(timeout_s):
                process.kill()
                return f"took more than {timeout_s:.0f} s"
            return here.recv()
        except EOFError:
            process.join()
            return f"the process ended with {process.exitcode} and without an answer"
        finally:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            here.close()
