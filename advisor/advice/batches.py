"""What rules know of a loop's batches: how its loader is set, and what it costs to hand one over."""

from __future__ import annotations

from advisor.advice.edits import Estimate
from advisor.advice.loop import Loop

#: Taking a ready batch from the queue of the workers.
TAKE_NS = Estimate(600_000.0, 200_000.0, 50_000.0)
#: One thread's copy from the workers' shared memory, mapped anew for each batch, into pinned memory: an
#: H200's driver staged 38 MB batches from there at 5.2 GB/s, and 3 MB ones that the process had made at 9.5
#: GB/s. The slow end is an older host's.
PIN_THREAD_BYTES_PER_S = Estimate(4.5e9, 7e9, 15e9)


def loader_settings(loop: Loop) -> list[str]:
    """The settings that matter, as a line of evidence; none where the capture has none."""
    loader = loop.setting("loader")
    if not isinstance(loader, dict):
        return []
    keys = ("batch_size", "num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
    given = ", ".join(f"{key}={loader[key]!r}" for key in keys if loader.get(key) is not None)
    return [f"now: {loader.get('class') or 'DataLoader'}({given})"]
