"""The folder of traces with its ``payoff.json``, and the results file."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "payoff.json"


class Store:
    """Measured cases, kept beside their traces.

    ``payoff.json`` holds the device, the versions, and for each case the step times before and after, the
    saving in percent, the fix, the precision, and what the case says of itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "payoff.json"
        self.content: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}

    @property
    def cases(self) -> dict[str, dict[str, Any]]:
        """Measured cases by name."""
        return self.content.setdefault("cases", {})

    def trace(self, name: str) -> Path:
        """The trace of a case."""
        return self.folder / f"{name}.json.gz"

    def has(self, name: str, plan: Mapping[str, Any]) -> bool:
        """Whether a case was measured in this way, and its trace is there."""
        case = self.cases.get(name)
        return case is not None and case["plan"] == plan and self.trace(name).exists()

    def check_machine(self, machine: Mapping[str, Any]) -> None:
        """One folder holds what one machine gave.

        Raises:
            SystemExit: it holds cases from another device or from other versions.
        """
        known = {key: self.content[key] for key in ("device", "versions") if key in self.content}
        if known and known != machine:
            raise SystemExit(
                f"{self.file} is from {known}, this is {machine}: name another folder by --traces"
            )

    def add(self, name: str, machine: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        """Enter a case and write the file, so that an interruption leaves what there is."""
        self.check_machine(machine)
        before, after = outcome["before_ms"], outcome["after_ms"]
        saved = None if after is None else round((before - after) / before * 100, 1)
        cases = {**self.cases, name: {**outcome, "saving_pct": saved}}
        self.content = {**machine, "gpu": machine["device"], "torch": machine["versions"]["torch"]}
        self.content["cases"] = cases
        put(self.file, self.content)


def stored_cases(path: Path, store: Store) -> dict[str, Any]:
    """Cases of a results file that the folder lacks, each with the day of its verdict as ``judged_on``.

    Raises:
        SystemExit: the file is from another device or other versions.
    """
    if not path.exists():
        return {}
    before = json.loads(path.read_text())
    store.check_machine({key: before[key] for key in ("device", "versions")})
    missing = {name: case for name, case in before["cases"].items() if name not in store.cases}
    return {name: {"judged_on": before["date"], **case} for name, case in missing.items()}


def write_results(
    path: Path,
    store: Store,
    command: str,
    figures: list[dict[str, Any]],
    others: Mapping[str, Any] | None = None,
) -> None:
    """The results file: where it comes from, the figures, and each case with its verdict; `others` too."""
    cases = {**(others or {}), **store.cases}
    put(
        path,
        {
            "command": command,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "device": store.content["device"],
            "versions": store.content["versions"],
            "figures": figures,
            "cases": {name: case for name, case in cases.items() if "verdict" in case},
        },
    )


def put(path: Path, content: Any) -> None:
    """Replace a JSON file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_text(json.dumps(content, indent=1) + "\n")
    draft.replace(path)
