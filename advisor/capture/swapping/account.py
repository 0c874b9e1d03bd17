"""The account that a run gives of its swaps: kept as it goes, told at its end, left for the report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from advisor.capture import notify
from advisor.capture.swapping.less import Part
from advisor.capture.swapping.told import counted, given_up, left_out, told
from advisor.report import format as fmt
from advisor.report.model import Swaps, SwapSite, SwapSteps
from advisor.report.swaps import refresh, swap_sites, write_swaps


class Account:
    """One run's.

    Args:
        asked: kinds.
        folder: where to leave it.
        first: whether this is rank 0, which alone tells.
        remarks: what is left alone in this run.

    Attributes:
        steps: whole steps of the last comparison; None where none were compared.
        against: what stood against more of it, comparison by comparison.
    """

    def __init__(
        self, asked: Sequence[str], folder: Callable[[], Path], *, first: bool, remarks: Sequence[str] = ()
    ) -> None:
        self._asked, self._folder, self._first, self._remarks = list(asked), folder, first, list(remarks)
        self._sites: list[SwapSite] = []
        self._pause_s: float | None = None
        self._told: Swaps | None = None
        self._written: Path | None = None
        self.steps: SwapSteps | None = None
        self.against: list[str] = []

    def say(self, line: str) -> None:
        """On the terminal."""
        if self._first:
            notify.info(f"swap: {line}")

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Training is held within it."""
        start_s = time.monotonic()
        try:
            yield
        finally:
            self._pause_s = (self._pause_s or 0.0) + time.monotonic() - start_s

    def decided(self, outcomes: Iterable[Any]) -> None:
        """Each site was decided by itself."""
        self._sites = swap_sites(outcomes)

    @property
    def count(self) -> str:
        """How many sites were looked at, those within larger ones that were refused included."""
        return counted(len(self._sites))

    @property
    def better(self) -> int:
        """How many sites have a candidate that is to serve."""
        return sum(site.chosen is not None for site in self._sites)

    def leave_out(self, out: Sequence[Part], why: str) -> None:
        """Whole steps are compared anew without these, for what stood against all of it."""
        all_of_it = f"with {counted(self.better)}"
        self._leave(dict.fromkeys(out, f"{all_of_it} {why}"))
        self.against.append(f"{all_of_it}, {why}")
        self.say(f"{self.against[-1]}; comparing anew without {fmt.few([part.what for part in out], 3)}")

    def find_at_fault(self, why: Mapping[Part, str]) -> None:
        """These are wrong in the whole step, though right by themselves: it is compared anew without them."""
        for site, reason in self._leave(why):
            self._remarks.append(f"{site.what} at {fmt.few(list(site.where))}: left out, since {reason}")
            self.say(f"{site.what} is left out, since {reason}; comparing anew without it")

    def leave_unreplayed(self, why: Mapping[Part, str]) -> None:
        """The step as it is is not replayed, for a reason of its own."""
        self._leave(why)

    def _leave(self, why: Mapping[Part, str]) -> list[tuple[SwapSite, str]]:
        """Note of the sites of these parts that they are left out; gives them as they were, each with why."""
        told = {(part.mechanism, part.what, part.where): reason for part, reason in why.items()}
        reasons = [told.get((site.mechanism, site.what, tuple(site.where))) for site in self._sites]
        pairs = list(zip(self._sites, reasons, strict=True))
        self._sites = [site if reason is None else left_out(site, reason) for site, reason in pairs]
        return [(site, reason) for site, reason in pairs if reason is not None]

    def give_up_patterns(self, why: str) -> None:
        """The step's graph runs as it is."""
        self._sites = [given_up(site, why) for site in self._sites]

    def end(self, why: str, *, kept: bool, remarks: Sequence[str]) -> None:
        """Nothing more is decided: say what came of it, and leave it for the report."""
        self._tell(why, kept, remarks)
        assert self._told is not None
        self.say(self._told.verdict)

    def amend(self, line: str, *, remarks: Sequence[str]) -> None:
        """What was kept is run another way than before: say so, and leave it for the report."""
        if line:
            self.say(line)
        self._tell("", True, remarks)

    def _tell(self, why: str, kept: bool, remarks: Sequence[str]) -> None:
        self._told = told(
            self._asked,
            self._sites,
            self.steps,
            kept=kept,
            why=why,
            against=self.against,
            pause_s=self._pause_s,
            remarks=[*self._remarks, *remarks],
        )
        self._write(anew=True)

    def refresh(self) -> None:
        """The recording and its report may be there by now: bring them up to date."""
        self._write()
        if self._written is not None:
            with self._unharmed():
                refresh(self._written.parent)

    def _write(self, *, anew: bool = False) -> None:
        """Leave it beside the recording, which may begin after swap has ended."""
        if not self._first or self._told is None:
            return
        with self._unharmed():
            folder, before = self._folder(), self._written
            if before is not None and before.parent == folder and not anew:
                return
            folder.mkdir(parents=True, exist_ok=True)
            self._written = write_swaps(self._told, folder)
            if before is not None and before != self._written:
                before.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _unharmed(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001
            notify.info(f"swap: what was done could not be written down: {type(error).__name__}: {error}")
