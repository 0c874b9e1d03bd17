"""What `advisor kernels check` does, without the command line: for a checkout, and under compute-sanitizer.

    python -m benchmarks.kernels.check [FAMILY...] [--output FILE]

Prints a line a check; the exit code is 1 if any fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from advisor.kernels.verify.run import checked_families, default_device, verify


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(checked_families())}")
    parser.add_argument("--output", type=Path, help="write the outcomes as JSON, check by check")
    args = parser.parse_args()
    outcomes = []
    for family in args.families or checked_families():
        for one in verify(family, default_device()):
            outcomes.append(one)
            share = "" if one.share is None else f"{one.share:.0%} of the allowed error"
            print(
                f"{'right' if one.ok else 'WRONG'} {one.family}: {one.kernel} {one.shape} {one.dtype} "
                f"{one.failure or share} ({one.seconds:.1f} s)",
                flush=True,
            )
            if args.output:
                args.output.write_text(json.dumps([dataclasses.asdict(o) for o in outcomes], indent=1))
    wrong = sum(not one.ok for one in outcomes)
    print(f"{len(outcomes) - wrong} of {len(outcomes)} right")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
