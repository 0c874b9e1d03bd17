"""Lightning under whichever of its two names is installed."""

from __future__ import annotations

from typing import Any

pl: Any
try:
    import pytorch_lightning as pl
except ImportError:
    import lightning.pytorch as pl  # type: ignore[no-redef]

__all__ = ["pl"]
