"""Hardware counters of kernels, read from what Nsight Compute exports.

Three spellings are read, plain or gzipped: the raw page (``ncu --csv --page raw``: a column a metric, the
second row holds the units), the details page (a row a metric), and the table of `benchmarks/counters`.
Metrics that are not there are None.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from advisor.errors import InputError

#: What to run to get a file that this module reads.
COMMAND = (
    "ncu --csv --page raw --print-units base --clock-control none --metrics "
    "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,"
    "sm__sass_thread_inst_executed_op_ffma_pred_on.sum,sm__sass_thread_inst_executed_op_fadd_pred_on.sum,"
    "sm__sass_thread_inst_executed_op_fmul_pred_on.sum,sm__ops_path_tensor_src_bf16_dst_fp32.sum,"
    "sm__ops_path_tensor_src_fp16_dst_fp32.sum,sm__ops_path_tensor_src_tf32_dst_fp32.sum,"
    "sm__inst_executed_pipe_tensor.sum --log-file ncu.csv python train.py"
)
#: Below this many FLOPs a kernel does not count as one of matrix units: their counters also tick for others.
_TENSOR_FLOPS = 1e9
#: From so many matrix instructions a matrix product used matrix units, their FLOPs counted or not.
_TENSOR_INSTRUCTIONS = 4e5
#: FLOPs of one thread's instruction; 16-bit ones work on pairs.
_VECTOR = {
    "ffma": ("fp32", 2), "fadd": ("fp32", 1), "fmul": ("fp32", 1),
    "hfma": ("fp16", 4), "hadd": ("fp16", 2), "hmul": ("fp16", 2),
    "dfma": ("fp64", 2), "dadd": ("fp64", 1), "dmul": ("fp64", 1),
}  # fmt: skip
_VECTOR_METRIC = re.compile(r"sms?p?__sass_thread_inst_executed_op_([fhd](?:fma|add|mul))_pred_on\.sum")
_TENSOR_METRIC = re.compile(r"sm__ops_path_tensor_src_([a-z]+\d+)(_dst_\w+?)?(_sparsity_\w+)?\.sum")
_INSTRUCTIONS_METRIC = re.compile(r"sms?p?__inst_executed_pipe_tensor(_\w+)?\.sum")
_PLAIN = {
    "gpu__time_duration.sum": "time_ns",
    "gpu__time_duration.avg": "time_ns",
    "dram__bytes_read.sum": "bytes_read",
    "dram__bytes_op_read.sum": "bytes_read",
    "dram__bytes_write.sum": "bytes_written",
    "dram__bytes_op_write.sum": "bytes_written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_pct",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "dram_pct",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_pct",
    # The compact table's own names.
    "time_ns": "time_ns",
    "dram_read_bytes": "bytes_read",
    "dram_write_bytes": "bytes_written",
    "dram_pct": "dram_pct",
    "sm_pct": "sm_pct",
    "tensor_inst": "tensor_instructions",
}
_UNIT = re.compile(r"([KMGT]?)(byte|b|inst|op|ops|flop|cycle|sector)s?")
_TIME_UNITS = {
    "s": 1e9, "second": 1e9, "sec": 1e9, "ms": 1e6, "msecond": 1e6, "msec": 1e6, "us": 1e3, "µs": 1e3,
    "usecond": 1e3, "usec": 1e3, "ns": 1.0, "nsecond": 1.0, "nsec": 1.0,
}  # fmt: skip
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True)
class Counted:
    """What the counters say of one launch; None where a metric was not collected.

    Attributes:
        kernel: name as Nsight Compute spells it.
        time_ns: duration under Nsight Compute, caches as its options left them.
        bytes_read, bytes_written: of device memory.
        instructions: of plain arithmetic units, per thread, by kind: ``ffma``, ``fadd``, ``hmul``, ...
        tensor_flops: by dtype, of matrix units.
        tensor_instructions: of matrix units.
        dram_pct, sm_pct: of peak.
    """

    kernel: str
    time_ns: float | None = None
    bytes_read: float | None = None
    bytes_written: float | None = None
    instructions: Mapping[str, float] = field(default_factory=dict)
    tensor_flops: Mapping[str, float] = field(default_factory=dict)
    tensor_instructions: float | None = None
    dram_pct: float | None = None
    sm_pct: float | None = None

    @property
    def vector_flops(self) -> dict[str, float]:
        """FLOPs of plain arithmetic units, by dtype."""
        flops: dict[str, float] = {}
        for instruction, count in self.instructions.items():
            dtype, each = _VECTOR[instruction]
            flops[dtype] = flops.get(dtype, 0.0) + each * count
        return flops

    @property
    def on_tensor_cores(self) -> bool:
        """Whether matrix units did counted work."""
        return max(self.tensor_flops.values(), default=0.0) > _TENSOR_FLOPS

    @property
    def flops(self) -> float | None:
        """FLOPs of the unit that did the work: matrix units where they did any, else plain arithmetic.

        None where neither was collected, or where matrix units worked on a dtype that was not collected.
        """
        if self.on_tensor_cores:
            return sum(self.tensor_flops.values())
        uncounted = (self.tensor_instructions or 0) > _TENSOR_INSTRUCTIONS and "gemm" in self.kernel
        if uncounted or not self.instructions:
            return None
        return sum(self.vector_flops.values())

    @property
    def pipe(self) -> str | None:
        """The unit that did the work, as `Cost.pipe` names it; None where `flops` is."""
        if self.flops is None:
            return None
        unit = "tensor" if self.on_tensor_cores else "vector"
        work = self.tensor_flops if self.on_tensor_cores else self.vector_flops
        return f"{unit}_{max(work, key=lambda dtype: work[dtype])}"

    @property
    def bytes(self) -> float | None:
        """Bytes read and written."""
        if self.bytes_read is None or self.bytes_written is None:
            return None
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True, slots=True)
class CounterFile:
    """The launches of one file, in the order in which they were launched.

    Attributes:
        path: where it was read from.
        launches: one entry a kernel launch.
        skipped: lines between the launches that were none: a program's own output.
    """

    path: str
    launches: list[Counted]
    skipped: int = 0


def read_counters(path: Path) -> CounterFile:
    """Read counters of Nsight Compute.

    Raises:
        InputError: the file cannot be read, or is no such table, or counts nothing that a roofline needs.
    """
    lines = _text(path).splitlines()
    start, delimiter = _header(lines)
    if start is None:
        raise _not_counters(path, "it has no header row with a column 'Kernel Name'")
    rows = list(csv.reader(lines[start:], delimiter=delimiter))
    header = [cell.strip() for cell in rows[0]]
    body = [row for row in rows[1:] if len(row) == len(header)]
    skipped = sum(1 for row in rows[1:] if row and len(row) != len(header))
    launches_of = _of_details if "Metric Name" in header else _of_columns
    tables = list(launches_of(header, body))
    if not tables:
        raise _not_counters(path, "it lists no kernel launch")
    convert = _Converter(value for _, cells in tables for value, _ in cells.values())
    launches = [_counted(kernel, cells, convert) for kernel, cells in tables]
    if all(one.bytes_read is None and one.flops is None for one in launches):
        raise _not_counters(path, "no launch has the metrics dram__bytes_read.sum or FLOPs")
    return CounterFile(str(path), launches, skipped)


def base_name(kernel: str) -> str:
    """A kernel's name without return type, namespaces, template and call arguments.

    Nsight Compute and Kineto spell those differently; what is left is equal in both.

    Example:
        >>> base_name("void at::native::(anonymous namespace)::foo<float>(float*)")
        'foo'
    """
    for part in ("void ", "at::native::", "(anonymous namespace)::", "<unnamed>::"):
        kernel = kernel.replace(part, "")
    return re.split(r"[<(]", kernel, maxsplit=1)[0].rpartition("::")[2]


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise InputError(f"{path}: damaged gzip: {error}") from error
    for encoding in ("utf-8-sig", "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "cp1252"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    return data.decode("utf-8", "replace")


def _not_counters(path: Path, reason: str) -> InputError:
    return InputError(f"{path}: no counters of Nsight Compute: {reason}. Make one with: {COMMAND}")


def _header(lines: Sequence[str]) -> tuple[int | None, str]:
    """Index of the header row, after whatever the profiled program printed, and its delimiter."""
    for i, line in enumerate(lines):
        for delimiter in ",;\t":
            cells = [cell.strip().strip('"') for cell in line.split(delimiter)]
            if "Kernel Name" in cells or {"kernel", "time_ns"} <= set(cells):
                return i, delimiter
    return None, ","


Cells = dict[str, tuple[str, str]]


def _of_columns(header: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[tuple[str, Cells]]:
    """Launches of the raw page or the compact table, each with its metrics' values and units."""
    kernel = header.index("Kernel Name" if "Kernel Name" in header else "kernel")
    number = next((header.index(name) for name in ("ID", "launch") if name in header), None)
    wanted = [i for i, name in enumerate(header) if _is_wanted(name)]
    units = [""] * len(header)
    for row in body:
        if number is not None and not row[number].strip().isdigit():
            # The row of units has no number and no name.
            if not row[kernel].strip():
                units = list(row)
            continue
        yield row[kernel], {header[i]: (row[i], units[i]) for i in wanted}


def _of_details(header: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[tuple[str, Cells]]:
    """Launches of the details page, where each metric has a row."""
    column = {name: i for i, name in enumerate(header)}
    launches: dict[tuple[str, str], tuple[str, Cells]] = {}
    for row in body:
        number = row[column["ID"]].strip() if "ID" in column else ""
        if number.isdigit():
            process = row[column["Process ID"]] if "Process ID" in column else ""
            _, cells = launches.setdefault((process, number), (row[column["Kernel Name"]], {}))
            name = row[column["Metric Name"]]
            if _is_wanted(name):
                unit = row[column["Metric Unit"]] if "Metric Unit" in column else ""
                cells[name] = (row[column["Metric Value"]], unit)
    yield from launches.values()


def _is_wanted(name: str) -> bool:
    return (
        name in _PLAIN
        or name in _VECTOR
        or name.startswith("tensor_flops_")
        or any(p.fullmatch(name) for p in (_VECTOR_METRIC, _TENSOR_METRIC, _INSTRUCTIONS_METRIC))
    )


class _Converter:
    """Numbers as any locale writes them: which mark is the decimal one shows in the file as a whole."""

    def __init__(self, values: Iterable[str]) -> None:
        self._decimal = _decimal_mark(values)

    def __call__(self, text: str, unit: str) -> float | None:
        text = re.sub(r"[\s'_\u00a0\u202f]", "", text)
        other = "," if self._decimal == "." else "."
        try:
            value = float(text.replace(other, "").replace(self._decimal, "."))
        except ValueError:
            return None
        if value != value or value in (float("inf"), float("-inf")):
            return None
        return value * _scale(unit.strip())


def _decimal_mark(values: Iterable[str]) -> str:
    for text in values:
        marks = [c for c in text if c in ",."]
        if len(set(marks)) == 2:
            return marks[-1]
        if len(marks) > 1:
            return "." if marks[0] == "," else ","
        if marks and len(text.strip().partition(marks[0])[2]) != 3:
            return marks[0]
    return "."


def _scale(unit: str) -> float:
    if unit.lower() in _TIME_UNITS:
        return _TIME_UNITS[unit.lower()]
    found = _UNIT.fullmatch(unit) or _UNIT.fullmatch(unit[:1] + unit[1:].lower())
    return _PREFIXES[found[1]] if found else 1.0


def _counted(kernel: str, cells: Cells, convert: _Converter) -> Counted:
    plain: dict[str, float] = {}
    executed: dict[str, float] = {}
    tensor: dict[str, dict[str, float]] = {}
    instructions: dict[str, float] = {}
    for name, (text, unit) in cells.items():
        value = convert(text, unit)
        if value is None:
            continue
        if name in _PLAIN:
            plain.setdefault(_PLAIN[name], value)
        elif found := _VECTOR_METRIC.fullmatch(name):
            executed.setdefault(found[1], value)
        elif name in _VECTOR:
            executed.setdefault(name, value)
        elif found := _TENSOR_METRIC.fullmatch(name):
            kind = ("dst" if found[2] else "all") + (" part" if found[3] else "")
            parts = tensor.setdefault(found[1], {})
            parts[kind] = parts.get(kind, 0.0) + value
        elif name.startswith("tensor_flops_"):
            tensor.setdefault(name.removeprefix("tensor_flops_"), {})["all"] = value
        elif found := _INSTRUCTIONS_METRIC.fullmatch(name):
            kind = "part" if found[1] else "all"
            instructions[kind] = instructions.get(kind, 0.0) + value
    if instructions:
        plain.setdefault("tensor_instructions", instructions.get("all", instructions.get("part", 0.0)))
    # The whole, where it was asked for; else the sum of its parts: by destination, or sparse and dense.
    kinds = ("all", "dst", "all part", "dst part")
    totals = {dtype: next(parts[kind] for kind in kinds if kind in parts) for dtype, parts in tensor.items()}
    return Counted(kernel, instructions=executed, tensor_flops=totals, **plain)
