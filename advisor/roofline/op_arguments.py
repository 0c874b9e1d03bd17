"""The arguments that a trace recorded for an operator: raw, to compare calls by, and parsed."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from advisor.roofline.costs import Arg, parse_inputs

#: Dims, types, strides and values of a call's arguments, still as JSON.
RawArguments: TypeAlias = "tuple[bytes, bytes, bytes, bytes]"
NO_ARGUMENTS: RawArguments = (b"", b"", b"", b"")


class _OpArgs(msgspec.Struct, gc=False):
    dims: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="Input type")
    strides: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="Input Strides")
    concrete: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw, name="Concrete Inputs")


_OP_ARGS = msgspec.json.Decoder(_OpArgs)


def raw_arguments(raw: msgspec.Raw) -> RawArguments:
    """A call's arguments unparsed: a cheap key for equal calls."""
    try:
        args = _OP_ARGS.decode(raw)
    except msgspec.DecodeError:
        return NO_ARGUMENTS
    return bytes(args.dims), bytes(args.types), bytes(args.strides), bytes(args.concrete)


def parsed_arguments(args: RawArguments) -> tuple[tuple[Arg, ...], tuple[str, ...]]:
    """Tensors and scalar values of a call; what cannot be read is left out."""
    lists = []
    for text in args:
        try:
            lists.append(msgspec.json.decode(text) if text else None)
        except msgspec.DecodeError:
            lists.append(None)
    return parse_inputs(*lists)
