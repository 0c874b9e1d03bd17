"""The replay: a step's graph of host work, launches and waits, played with edits to tell what they save."""

from advisor.advice.replay.replay import Outcome, Replay

__all__ = ["Outcome", "Replay"]
