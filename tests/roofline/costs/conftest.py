"""The truth file, joined without the product's own reader."""

import bisect
import gzip
import json

import pytest


@pytest.fixture(scope="session")
def counted(shared):
    """Operator events with their launches, in time order: ``[(event, [kernel event])]``."""
    events = json.loads(gzip.decompress((shared / "truth/ops_h200.json.gz").read_bytes()))["traceEvents"]
    spans = [event for event in events if event.get("ph") == "X"]
    ops = sorted((e for e in spans if e.get("cat") == "cpu_op"), key=lambda e: (e["ts"], -e["dur"]))
    starts = [op["ts"] for op in ops]
    launched_at = {
        e["args"]["correlation"]: e
        for e in spans
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    kernels = [e for e in spans if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    joined: dict[int, list] = {}
    for kernel in sorted(kernels, key=lambda e: e["ts"]):
        launch = launched_at[kernel["args"]["correlation"]]
        index = bisect.bisect_right(starts, launch["ts"]) - 1
        while not (
            ops[index]["tid"] == launch["tid"] and ops[index]["ts"] + ops[index]["dur"] >= launch["ts"]
        ):
            index -= 1
        joined.setdefault(index, []).append(kernel)
    return [(ops[index], of_op) for index, of_op in joined.items()]
