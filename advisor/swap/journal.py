"""What was changed, in order, and how to undo it: once, in part, for a while, or whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True)
class Change:
    """One thing that is changed and can be changed back.

    Attributes:
        what: for a reader: ``h.0.ln_1: advisor.kernels.layer_norm``.
        do: makes the change.
        undo: takes it back; does nothing where the change was not made, or made in part.
    """

    what: str
    do: Callable[[], None]
    undo: Callable[[], None]


class Journal:
    """Changes in force, first to last. As a context manager it restores at the end."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._on = True
        #: What could not be undone, by the changes' names.
        self.faults: list[str] = []

    def __len__(self) -> int:
        return len(self._changes)

    @property
    def on(self) -> bool:
        """Whether the changes are in force; false while toggled off."""
        return self._on

    @property
    def changes(self) -> list[str]:
        """What is in force, by name, in the order of the changes."""
        return [change.what for change in self._changes]

    def make(self, change: Change) -> None:
        """Make a change and note it. If it fails half-way, it is taken back before the error goes on."""
        # Noted first: an interruption between the two finds it here.
        self._changes.append(change)
        try:
            if self._on:
                change.do()
        except BaseException:
            self._changes.remove(change)
            self._undo(change)
            raise

    def toggle(self, on: bool) -> None:
        """Take the changes back for a while, or make them again, in order; all of them or none."""
        if on == self._on:
            return
        if not on:
            self._on = False
            for change in reversed(self._changes):
                self._undo(change)
            return
        try:
            for change in self._changes:
                change.do()
        except BaseException:
            for change in reversed(self._changes):
                self._undo(change)
            raise
        self._on = True

    def drop(self, what: str) -> bool:
        """Take back the changes of one name, and forget them; whether there were any."""
        dropped = [change for change in self._changes if change.what == what]
        for change in reversed(dropped):
            if self._on:
                self._undo(change)
            self._changes.remove(change)
        return bool(dropped)

    def restore(self, down_to: int = 0) -> None:
        """Take back all changes but the first `down_to`, the last first. Doing so twice does nothing."""
        while len(self._changes) > down_to:
            # Off the list only once undone: an interruption here leaves it for the next call.
            if self._on:
                self._undo(self._changes[-1])
            self._changes.pop()

    @contextmanager
    def nested(self, keep: bool = False) -> Iterator[Journal]:
        """Take back, at the end, what is changed within; with `keep`, only if an exception ends it."""
        before = len(self)
        try:
            yield self
        except BaseException:
            self.restore(before)
            raise
        if not keep:
            self.restore(before)

    def _undo(self, change: Change) -> None:
        # One change that cannot be taken back must not keep the others from it.
        try:
            change.undo()
        except Exception as error:  # noqa: BLE001
            self.faults.append(f"{change.what}: {type(error).__name__}: {error}")

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
