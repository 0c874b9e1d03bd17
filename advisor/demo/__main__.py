"""`python -m advisor.demo LOOP FOLDER [STEPS]`: train one loop and print the path of its report."""

from __future__ import annotations

import sys
from pathlib import Path

from advisor.demo.run import train


def main(name: str, folder: str, steps: str | None = None) -> None:
    """Train the loop called `name`."""
    page = train(name, Path(folder), int(steps) if steps else None)
    if page is None:
        sys.exit(1)
    print(page)


if __name__ == "__main__":
    main(*sys.argv[1:])
