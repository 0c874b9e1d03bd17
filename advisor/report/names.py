"""Kernel names cut down to what tells them apart."""

from __future__ import annotations

import re

from advisor.report import format as fmt

#: Launchers that run whatever functor they are given.
_GENERIC = re.compile(r"elementwise|reduce|index|gather|scatter|multi_tensor|foreach|^Kernel2?$", re.I)
#: Launchers whose own name says nothing at all.
_NAMELESS = ("Kernel", "Kernel2")
_WORD = re.compile(r"\w+")
_TELLING = re.compile(r"[Ff]unctor|KernelImpl|Ops|^cutlass_|._kernel")
#: Wrappers that stand around the functor which does the work.
_WRAPPERS = ("AUnaryFunctor", "BUnaryFunctor", "BinaryFunctor", "gpu_kernel_impl")
_CPP = re.compile(r"(?:void )?[A-Za-z_][\w:]*[<(]")


def short_name(name: str, width: int = 64) -> str:
    """The kernel's own name: no template arguments, parameters, return type or namespaces.

    Generic launchers (``vectorized_elementwise_kernel``) come after the functor that they were
    launched with, since it alone says what they do. Names that are not C++ come back whole, cut to `width`.
    """
    whole = fmt.one_line(name)
    text = whole.replace("(anonymous namespace)::", "")
    if not _CPP.match(text):
        return fmt.shorten(whole, width)
    stem, arguments = _split_template(text.removeprefix("void "))
    own = stem.split("(", 1)[0].strip().rsplit("::", 1)[-1]
    if not re.fullmatch(r"[\w.~]+", own):
        return fmt.shorten(whole, width)
    if _GENERIC.search(own) and (functor := _functor(arguments, own)):
        return _with_launcher(functor, own, width)
    return fmt.shorten(own, width)


def _split_template(text: str) -> tuple[str, str]:
    """What stands outside all angle brackets, and what stands inside them."""
    depth = 0
    outside: list[str] = []
    inside: list[str] = []
    for char in text:
        if char == "<":
            depth += 1
            inside.append(" ")
        elif char == ">" and depth:
            depth -= 1
            inside.append(" ")
        else:
            (inside if depth else outside).append(char)
    return "".join(outside), "".join(inside)


def _with_launcher(functor: str, launcher: str, width: int) -> str:
    """The functor, and behind it the launcher's own name as far as there is room for it."""
    if launcher in _NAMELESS:
        return fmt.shorten(functor, width)
    kind = launcher.removeprefix("vectorized_").removeprefix("unrolled_").removesuffix("_kernel")
    both = f"{functor} · {kind}"
    return both if len(both) <= width else fmt.shorten(functor, width)


def _functor(arguments: str, own: str) -> str | None:
    words = (match.group() for match in _WORD.finditer(arguments))
    telling = (word for word in words if _TELLING.search(word))
    return next((word for word in telling if word != own and not word.startswith(_WRAPPERS)), None)
