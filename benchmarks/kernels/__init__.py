"""Speed of the bundled kernels, written to ``benchmarks/results/``; tools for whoever works on them.

    python -m benchmarks.kernels norm --quick     one or two sizes a kernel
    python -m benchmarks.kernels norm             all sizes
    python -m benchmarks.kernels --grid           twelve sizes of each memory-bound kernel
    python -m benchmarks.kernels                  every family

Sizes and clock are the package's own, `advisor.kernels.bench`. Here besides: `ahead` (compiles what a
benchmark runs, in processes that `spread` keeps), `aot` (what the compiler makes of the kernels, without a
GPU), `tune`, `tune_rows`, `tune_attention`, `tune_paged_attention` and `tune_quant` (launch parameters),
`sanitize` (compute-sanitizer), `session` (all that needs a GPU, in order of worth).
"""

import sys
from pathlib import Path

try:
    import advisor.kernels
except ImportError:
    # A checkout that is not installed: let the package find the folder that an installation maps into it.
    import advisor

    advisor.__path__.append(str(Path(__file__).resolve().parents[2]))
    sys.modules.pop("advisor.kernels", None)
