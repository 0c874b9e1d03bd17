"""Names in a trace are a stranger's: no pattern that is applied to them may take more than linear time."""

from __future__ import annotations

import importlib
import pkgutil
import re
import signal
from collections.abc import Iterator

import pytest

import advisor

LENGTH = 10_000
PIECES = (
    "a", "_", "0", " ", "<", ">", "::", ":", "a ", "a_", "_a", "a<", "<a>", "a::", "0x", "a0_", "(", ")",
    "()", ", ", "[0]", ".0", "\n", "\\", "\"", "aten::", "void ", "at::native::", "unsigned ", "{lambda()#1}",
    "triton_", "nccl", "sm90_", "128x", "_f16", "s1688gemm_", "-", "NaN", "- ", "=", "struct ", "é", "W ",
)  # fmt: skip
PREFIXES = ("", "void ", "triton_poi_fused_", '"')
#: Applied at one place each, never searched for.
MATCHED_ONLY = {
    "advisor.trace.mend._AFTER_VALUE",
    "advisor.trace.mend._AFTER_OTHER",
    "advisor.report.names._CPP",
    "advisor.report.gates._NUMBER",
    "advisor.report.hta_basis._COLLECTIVE",
}


def patterns() -> Iterator[tuple[str, re.Pattern]]:
    for module in pkgutil.walk_packages(advisor.__path__, "advisor."):
        if module.name.split(".")[1] in ("kernels", "report_templates", "demo", "capture", "swap"):
            continue
        if module.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            for pattern in value if isinstance(value, (tuple, list)) else [value]:
                if isinstance(pattern, re.Pattern):
                    yield f"{module.name}.{name}", pattern


def _too_slow(*_):
    raise TimeoutError


@pytest.mark.parametrize(("name", "pattern"), list(patterns()))
def test_a_pattern_takes_linear_time_on_any_name(name, pattern) -> None:
    # GIVEN a name of ten thousand characters that repeats one piece and ends in another
    before = signal.signal(signal.SIGVTALRM, _too_slow)
    try:
        for prefix in PREFIXES:
            for piece in PIECES:
                text = prefix + piece * (LENGTH // len(piece)) + "!"
                given = text.encode() if isinstance(pattern.pattern, bytes) else text
                # THEN each way to apply the pattern ends, in far less than this
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.5)
                try:
                    pattern.match(given)
                    if name not in MATCHED_ONLY:
                        pattern.search(given)
                except TimeoutError:
                    pytest.fail(f"{name} takes too long on {prefix + piece!r} repeated")
                finally:
                    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
