"""Recording work on a GPU as CUDA graphs, and leaving no trace where that fails."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from advisor.report import format as fmt
from advisor.swap.guard import no_garbage_collected
from advisor.swap.memory import grows

_T = TypeVar("_T")
#: Of the device's memory, what nothing may count on, and how much more than its peak a loop reserves.
_SPARE_BYTES = 2**29
_FRAGMENTED = 1.1


class Unrecordable(Exception):
    """Work that cannot be recorded; the message says why, in one line."""


@dataclass(frozen=True)
class Recorded:
    """A recorded forward and backward.

    Attributes:
        outputs, gradients: what they gave, in memory that each replay writes over.
        forward, backward: replay them, in turns.
    """

    outputs: list[Tensor | None]
    gradients: list[Tensor | None]
    forward: Callable[[], None]
    backward: Callable[[], None]


Forward = Callable[[], "list[Tensor | None]"]
Backward = Callable[[Sequence["Tensor | None"]], "list[Tensor | None]"]


class Recorder(Protocol):
    """Records one forward with its backward."""

    #: Whether the loop adds up the gradients of several steps now, so that a recording's lie beside them.
    adds_up: Callable[[], bool]

    @property
    def held_bytes(self) -> int:
        """What the recording takes at its peak beside what stays allocated, as an allocator counts."""
        ...

    def rehearse(self, run: Callable[[], object]) -> None:
        """Run it all as it will be recorded; raises `Unrecordable` if it cannot be."""
        ...

    def record(self, forward: Forward, backward: Backward, replaced_bytes: int = 0) -> Recorded:
        """Record both; raises `Unrecordable` if what was recorded may not be kept.

        Args:
            forward, backward: what to record.
            replaced_bytes: of the loop's gradients, in place of which the recording's will be.
        """
        ...

    def times_ns(self, launch: Callable[[], object], replay: Callable[[], object]) -> tuple[float, float]:
        """How long the host takes to launch something, and how long it takes as it is replayed."""
        ...

    def close(self) -> None:
        """What was recorded is no longer replayed."""
        ...


class CudaRecorder:
    """Two CUDA graphs that share a pool of memory.

    Args:
        device: whose work.
        loop_bytes: the peak of what the loop has allocated so far; 0 if it is not known.
        may_grow: whether the recorded step may take it further.
        adds_up: whether the loop adds up the gradients of several steps, asked at each.
    """

    def __init__(
        self,
        device: torch.device,
        loop_bytes: int = 0,
        *,
        may_grow: bool = False,
        adds_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self.adds_up = adds_up
        self._device, self._loop_bytes, self._may_grow = device, loop_bytes, may_grow
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self.held_bytes = 0

    def rehearse(self, run: Callable[[], object]) -> None:
        """Twice: what waits for the device once, to choose an algorithm, must not do so again."""
        with self._apart():
            run()
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                run()
            except RuntimeError as error:
                if "synchronizing" in str(error):
                    raise Unrecordable("the host waits for the device within it") from error
                raise
            finally:
                torch.cuda.set_sync_debug_mode(mode)

    def record(self, forward: Forward, backward: Backward, replaced_bytes: int = 0) -> Recorded:
        """Replays run on the stream that is current then."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        outputs, replay_forward = self._captured(forward)
        gradients, replay_backward = self._captured(lambda: backward(outputs))
        outputs = [None if o is None else o.detach() for o in outputs]
        torch.cuda.synchronize(self._device)
        now = torch.cuda.memory_reserved(self._device)
        allocated = torch.cuda.memory_allocated(self._device)
        # As the loop's peak is counted: what lies between the tensors of a pool is not. Outputs and gradients
        # stay allocated like any tensor.
        peak = torch.cuda.max_memory_allocated(self._device)
        self.held_bytes = max(0, peak - allocated)
        self._refuse_what_does_not_fit(now, max(0, now - before), allocated - replaced_bytes)
        _recorders.add(self)
        return Recorded(outputs, gradients, replay_forward, replay_backward)

    def times_ns(self, launch: Callable[[], object], replay: Callable[[], object]) -> tuple[float, float]:
        """Neither waits for the device within; each begins when it has nothing left to do."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self._device)
        start_ns = time.perf_counter_ns()
        launch()
        host_ns = time.perf_counter_ns() - start_ns
        torch.cuda.synchronize(self._device)
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return host_ns, begin.elapsed_time(end) * 1e6

    def close(self) -> None:
        """What was recorded is no longer replayed."""
        self.held_bytes = 0
        if self in _recorders:
            torch.cuda.synchronize(self._device)
            _recorders.discard(self)
        let_go_of_workspaces()

    def _refuse_what_does_not_fit(self, reserved: int, pool: int, allocated: int) -> None:
        """The step as it was must find its memory beside the recording: it is compared, and put back."""
        free, _ = torch.cuda.mem_get_info(self._device)
        if free + reserved < _FRAGMENTED * self._loop_bytes + pool + _SPARE_BYTES:
            raise Unrecordable(f"beside the loop there is no room for the {fmt.nbytes(pool)} of it")
        after_bytes = allocated + self.held_bytes + sum(other.held_bytes for other in _recorders)
        if self._loop_bytes and grows(self._loop_bytes, after_bytes) and not self._may_grow:
            before, after = fmt.nbytes(self._loop_bytes), fmt.nbytes(after_bytes)
            raise Unrecordable(
                f"it holds {fmt.nbytes(pool)}, with which memory would grow from {before} to {after}; "
                "swap_max_memory_growth allows more"
            )

    def _captured(self, run: Callable[[], _T]) -> tuple[_T, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        here = torch.cuda.current_stream(self._device)
        generator = torch.cuda.default_generators[self._device.index or 0]
        spare = generator.clone_state()
        try:
            with (
                no_garbage_collected(),
                # Other threads, such as a loader's that pins memory, go on as they like.
                torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ),
            ):
                result = run()
        except BaseException:
            # A recording that fails leaves its stream current, and the random numbers in the middle of one.
            torch.cuda.set_stream(here)
            with suppress(Exception):
                generator.graphsafe_set_state(spare)
            raise
        return result, graph.replay

    @contextmanager
    def _apart(self) -> Iterator[None]:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            here.wait_stream(self._stream)


def give_back(values: Sequence[object]) -> None:
    """Let go of the device's memory that is cached, once what took more of it than the loop's steps is over.

    Args:
        values: tensors among them are on the device.
    """
    if any(isinstance(value, Tensor) and value.is_cuda for value in values):
        torch.cuda.empty_cache()


_recorders: weakref.WeakSet[CudaRecorder] = weakref.WeakSet()


def let_go_of_workspaces() -> None:
    """Free the workspaces of matrix products, which threads have of their own, unless a recording has one."""
    if not _recorders:
        with suppress(AttributeError):
            torch._C._cuda_clearCublasWorkspaces()
