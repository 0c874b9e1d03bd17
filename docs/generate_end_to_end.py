"""Write the table of whole training runs into ``docs/swap.md``.

Run ``python docs/generate_end_to_end.py`` after `python benchmarks/end_to_end.py` has written
``benchmarks/results/end_to_end.json``. Without that file the page says that nothing was measured yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from marked import between

TARGET = Path(__file__).with_name("swap.md")
RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "end_to_end.json"
BEGIN, END = "<!-- end to end: from here -->", "<!-- end to end: to here -->"
_ABSENT = "Not yet measured: `benchmarks/results/end_to_end.json` does not exist."
#: Variants with a column of their own, and its title.
_OTHERS = {"compile": "torch.compile", "swap_compile": "swap and compile", "liger": "Liger"}

#: Names of candidates that stored results have from before, and those of now.
_EARLIER = {"attention (precise gradient)": "attention"}


def render(page: str, results: Mapping[str, Any] | None) -> str:
    """The page with the part between its two marks made anew.

    Args:
        page: its present text.
        results: the content of ``end_to_end.json``; None where there is none.

    Raises:
        ValueError: the page lacks a mark.
    """
    return between(page, BEGIN, END, _ABSENT if results is None else _part(results))


def load() -> dict[str, Any] | None:
    """The results, if there are any."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None


def _part(results: Mapping[str, Any]) -> str:
    versions = results["versions"]
    models = {name: m for name, m in results["models"].items() if "swap" in m["variants"]}
    others = [v for v in _OTHERS if any("step_ms" in m["variants"].get(v, {}) for m in models.values())]
    titles = ["model", "eager, ms", "swap, ms", "", *(f"{_OTHERS[v]}, ms" for v in others)]
    reserved = any("→" in _reserved(m["variants"]) for m in models.values())
    titles += ["peak, GB", *(["reserved, GB"] if reserved else []), "what was done", "s to try"]
    parts = [
        f"Measured on {results['date']} on {results['device']} with torch {versions['torch']}, "
        f"Triton {versions.get('triton', '?')}, Lightning {versions.get('lightning', '?')}, "
        f"by `{results['command']}`. "
        "A step's median; peak memory eager and with swap, what CUDA graphs hold included."
        + (" Reserved is what the process has of the device, cached blocks included." if reserved else ""),
        "",
        f"| {' | '.join(titles)} |",
        f"|{'---|' * len(titles)}",
        *(_row(name, model["variants"], others, reserved) for name, model in models.items()),
    ]
    for paragraph in ([*_names(parts)], [*_curves(models)]):
        parts += ["", *paragraph] if paragraph else []
    return "\n".join(parts)


def _names(rows: Iterable[str]) -> Iterator[str]:
    """What names of an earlier version mean, where a row has one."""
    for earlier, now in _EARLIER.items():
        if any(f"`{earlier}`" in row for row in rows):
            yield f"`{earlier}` is an earlier name of `{now}`."


def _row(name: str, variants: Mapping[str, Any], others: list[str], reserved: bool) -> str:
    swap, eager = variants["swap"], variants.get("eager", {})
    if swap.get("step_ms") is None:
        why = swap.get("failed") or swap.get("skipped") or "no outcome"
        return f"| {name} |{' |' * (len(others) + 4 + reserved)} {why} | |"
    told = swap.get("swaps", {})
    # Eager steps of the same run, where the loop without swap was not run by itself.
    steps = told.get("steps") or {}
    before_ms = eager.get("step_ms") or steps.get("eager_p50_ms")
    peaks = eager.get("peak_bytes") or steps.get("eager_peak_bytes"), swap["peak_bytes"]
    cells = [name, _number(before_ms, ".1f"), f"{swap['step_ms']:.1f}"]
    # Where nothing was kept, both are the same loop, and what lies between them is noise.
    compared = before_ms and told.get("kept") is not False
    cells.append(f"{before_ms / swap['step_ms']:.2f}×" if compared else "–")
    cells += [_number(variants.get(v, {}).get("step_ms"), ".1f") for v in others]
    cells.append(" → ".join(_number(p / 1e9 if p else None, ".1f") for p in peaks))
    cells += [_reserved(variants)] if reserved else []
    cells += [_done(told), _number(told.get("pause_s"), ".1f")]
    return f"| {' | '.join(cells)} |"


def _reserved(variants: Mapping[str, Any]) -> str:
    """Eager and with swap, where both were measured."""
    both = [variants.get(name, {}).get("reserved_bytes") for name in ("eager", "swap")]
    return " → ".join(f"{n / 1e9:.1f}" for n in both) if all(both) else "–"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _done(told: Mapping[str, Any]) -> str:
    sites = told.get("sites", ())
    chosen = dict.fromkeys(s["chosen"].removeprefix("advisor.kernels.") for s in sites if s["chosen"])
    if not chosen:
        return str(told.get("verdict", ""))
    replayed = any("is replayed" in remark for remark in told.get("remarks", ()))
    return ", ".join(f"`{name}`" for name in chosen) + ("; replayed" if replayed else "")


def _curves(models: Mapping[str, Any]) -> Iterator[str]:
    for name, model in models.items():
        curve = model.get("curve")
        if curve:
            yield (
                f"Loss of {name} over {curve['steps']} steps, smoothed: {curve['distance']:.3g} from the "
                f"eager loop's on average, where two seeds of the eager loop are {curve['spread']:.3g} "
                f"apart; at most {curve['first_difference']:.2g} in any of the first 20."
            )
            if "sdpa" in curve:
                yield _of_sdpa(name, curve)


def _of_sdpa(name: str, curve: Mapping[str, Any]) -> str:
    eager, other, swapped = (f"{loss:.3g}" for loss in curve["last_losses"])
    distance, last = (f"{curve['sdpa'][what]:.3g}" for what in ("distance", "last_loss"))
    return (
        f"{name} with `scaled_dot_product_attention` in the model, without swap: {distance} from the eager "
        f"loop's, and in the end at a loss of {last}, where the two seeds of the eager loop are at {eager} "
        f"and {other}, and the swapped run is at {swapped}."
    )


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8"), load()), encoding="utf-8")
