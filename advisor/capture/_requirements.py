"""Imported first by what needs torch: without it there is one line that names the pip command."""

from advisor.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError("recording a training loop", "torch", "pytorch-lightning") from error
