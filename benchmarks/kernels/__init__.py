"""Speed of the bundled kernels beside eager PyTorch, torch.compile and Liger.

    python -m benchmarks.kernels norm --quick     one or two sizes a kernel
    python -m benchmarks.kernels norm             the whole grid
    python -m benchmarks.kernels                  every family

A family is a module here with `cases(quick: bool) -> Iterator[Case]`; nothing lists them.
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
