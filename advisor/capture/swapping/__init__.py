"""Swap in a running Trainer: `start` says whether there is anything to do, `run` does it."""
