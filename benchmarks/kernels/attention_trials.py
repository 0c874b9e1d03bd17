"""What `tune_attention` does in other processes: compile without a GPU, time and compare on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast

import torch

#: Parameters by kernel and head dimension: ("roles" or "tile", then theirs); None is what the table has.
Parameters = dict[tuple[str, int], "tuple[Any, ...] | None"]
KERNELS = ("forward", "query_gradient", "key_gradient")
#: (batch, heads, tokens) at which candidates are timed, causal.
SHAPES = {64: (4, 32, 4096), 128: (4, 16, 4096)}


@dataclass(frozen=True)
class Trial:
    """Parameters to be tried for one kernel."""

    kernel: str
    dim: int
    parameters: tuple[Any, ...] | None
    #: (batch, heads, tokens); that of `SHAPES` if none is given.
    shape: tuple[int, int, int] | None = None

    @property
    def like(self) -> tuple[str, bool]:
        """What fails alike: a kernel, with or without roles."""
        return self.kernel, self.parameters is not None and self.parameters[0] == "roles"

    def __str__(self) -> str:
        return "now" if self.parameters is None else f"{self.parameters[0]}{self.parameters[1:]}"


@dataclass(frozen=True)
class Shape:
    """A case of attention: (batch, heads, key heads, queries, keys, dimension), and what is masked."""

    batch: int
    heads: int
    heads_k: int
    n: int
    m: int
    dim: int
    causal: bool = False
    window: tuple[int, int] | None = None
    #: ``bool_mask``, ``padding``, ``causal_padding``, ``documents``; ``float_mask`` (causal padding as 0 and
    #: -inf), ``bias`` (a number a score) or ``alibi`` (a number a key).
    mask: str = ""
    dtype: str = "bfloat16"
    lower_right: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.heads_k else f"{self.heads}/{self.heads_k}"
        length = f"{self.n}" if self.n == self.m else f"{self.n}/{self.m}"
        kind = "causal" if self.causal else "full"
        extra = f" window {self.window}" if self.window else ""
        extra += f" {self.mask}" if self.mask else ""
        extra += " fp16" if self.dtype == "float16" else ""
        return f"{self.batch}x{heads}x{length}x{self.dim} {kind}{extra}"


CASES = [
    Shape(4, 16, 16, 4096, 4096, 128, causal=True),
    Shape(8, 12, 12, 1024, 1024, 64, causal=True),
    Shape(4, 16, 16, 4096, 4096, 128, mask="bool_mask"),
    Shape(4, 16, 16, 4096, 4096, 128, mask="padding"),
    Shape(4, 16, 16, 4096, 4096, 128, mask="causal_padding"),
    Shape(4, 16, 16, 4096, 4096, 128, mask="documents"),
    Shape(4, 16, 16, 4096, 4096, 128, mask="float_mask"),
    Shape(4, 16, 16, 4096, 4096, 128, mask="bias"),
    Shape(4, 16, 16, 4096, 4096, 128, causal=True, mask="alibi"),
    Shape(2, 16, 16, 8192, 8192, 128),
    Shape(4, 32, 32, 4096, 4096, 64, causal=True),
    Shape(4, 32, 32, 4096, 4096, 64),
    Shape(16, 16, 16, 1024, 1024, 128, causal=True),
    Shape(1, 16, 16, 16384, 16384, 128, causal=True),
    Shape(4, 16, 16, 4096, 4096, 128, causal=True, window=(1024, 0)),
]
CHECKS = [
    Shape(2, 4, 2, 515, 700, 128, causal=True, lower_right=True),
    Shape(2, 4, 4, 700, 300, 64, causal=True, dtype="float16"),
    Shape(1, 4, 1, 1000, 1000, 96, window=(100, 30)),
    Shape(2, 2, 2, 333, 777, 64, mask="bool_mask"),
    Shape(2, 4, 4, 650, 650, 128, causal=True, mask="bool_mask"),
    Shape(2, 4, 2, 650, 650, 128, mask="documents"),
    Shape(3, 4, 4, 650, 650, 64, mask="float_mask"),
    Shape(2, 4, 4, 333, 777, 128, mask="bias"),
    Shape(2, 4, 2, 650, 650, 64, causal=True, mask="alibi"),
]
#: What checks run with, whatever was found.
_PLAINLY = {
    ("forward", 128): ("roles", 128, 2, 2, 1),
    ("query_gradient", 128): ("roles", 64, 3, 2, 1),
    ("key_gradient", 128): ("roles", 64, 3, 2, 1),
    ("forward", 64): ("roles", 128, 2, 3, 1),
    ("query_gradient", 64): ("roles", 128, 3, 2, 1),
    ("key_gradient", 64): ("roles", 64, 4, 2, 1),
}


def _use(parameters: Mapping[tuple[str, int], tuple[Any, ...] | None]) -> None:
    """Let the tables answer with these for the head dimensions named, as they are for all others."""
    from advisor.kernels import _attention_launch as launch

    tables = dict(zip(KERNELS, (launch.FORWARD, launch.QUERY_GRADIENT, launch.KEY_GRADIENT), strict=True))
    for kernel, table in tables.items():
        for there in (table.plain, table.roles, table.bare):
            vars(there).pop("pick", None)

        def pick(size: int, device: Any, *, kernel: str, own: Callable[..., Any], kind: str) -> Any:
            found = parameters.get((kernel, 64 if size <= 64 else 128))
            if found is None or (kind == "tile") > (found[0] == "tile"):
                return own(size, device)
            if kind == "roles":
                return launch.roles(*found[1:]) if found[0] == "roles" else {}
            return launch.tile(*found[1:], 1)

        for kind, there in (("tile", table.plain), ("roles", table.roles), ("roles", table.bare)):
            own = there.pick

            def bound(size: int, device: Any, kernel=kernel, own=own, kind=kind) -> Any:
                return pick(size, device, kernel=kernel, own=own, kind=kind)

            there.pick = bound  # type: ignore[method-assign]


def made_mask(shape: Shape, device: str) -> torch.Tensor | None:
    """What a case masks with, broadcastable to (batch, heads, queries, keys)."""
    from advisor.kernels.bench.attention import mask_of

    # The values of what is only compiled for do not matter.
    make = torch.empty if device == "cpu" else torch.randn
    if not shape.mask:
        return None
    if shape.mask == "bool_mask":
        return make(shape.n, shape.m, device=device) > -0.8
    if shape.mask in ("bias", "alibi"):
        rows = shape.n if shape.mask == "bias" else 1
        return make(1, shape.heads, rows, shape.m, device=device, dtype=torch.bfloat16)
    kind = "causal_padding" if shape.mask == "float_mask" else shape.mask
    mask: torch.Tensor = mask_of(kind, shape.batch, shape.n, device)
    if shape.mask == "float_mask":
        zeros = torch.zeros(mask.shape, device=device, dtype=torch.bfloat16)
        mask = zeros.masked_fill_(~mask, -torch.inf)
    return mask


class Problem:
    """The tensors of a case, and calls of our operators on them."""

    def __init__(self, shape: Shape, device: str, *, precise: bool = True) -> None:
        make = torch.empty if device == "cpu" else torch.randn
        dtype = getattr(torch, shape.dtype)

        def rows(heads: int, tokens: int) -> torch.Tensor:
            return make(shape.batch, tokens, heads, shape.dim, device=device, dtype=dtype).transpose(1, 2)

        self.shape, self.precise = shape, precise
        self.q, self.grad = rows(shape.heads, shape.n), rows(shape.heads, shape.n)
        self.k, self.v = rows(shape.heads_k, shape.m), rows(shape.heads_k, shape.m)
        self.mask = made_mask(shape, device)
        left, right = shape.window or (-1, -1)
        right = 0 if shape.causal else right
        self.rest = (shape.dim**-0.5, 0.0, 0.0, left, right, shape.lower_right, shape.n, shape.m)
        self.bias = None
        if self.mask is not None:
            self.bias = self.mask.expand(shape.batch, shape.heads, shape.n, shape.m)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from advisor.kernels import _attention_ops as ops

        return ops.attention_op(self.q, self.k, self.v, self.bias, None, None, None, *self.rest, self.precise)

    def untouched(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the forward returns, as far as shapes go."""
        from advisor.kernels import _attention_ops as ops

        return ops._results(self.q, self.v, self.precise)

    def backward(
        self, out: torch.Tensor, lse: torch.Tensor, residue: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        from advisor.kernels import _attention_ops as ops

        saved = (self.grad, self.q, self.k, self.v, out, lse, self.bias)
        return ops.attention_gradient_op(*saved, None, None, None, *self.rest, residue)

    def both(self) -> tuple[torch.Tensor, ...]:
        out, *statistics = self.forward()
        return (out, *self.backward(out, *statistics))

    def reference(self) -> tuple[torch.Tensor, ...]:
        """Output and gradients of our plain implementation, in fp32, a batch and key head at a time."""
        from advisor.kernels._tf32 import without_tf32
        from advisor.kernels.attention import attention_reference

        shape, group = self.shape, self.shape.heads // self.shape.heads_k
        found = [torch.empty_like(x, dtype=torch.float32) for x in (self.q, self.q, self.k, self.v)]
        with without_tf32():
            for batch in range(shape.batch):
                for head in range(shape.heads_k):
                    own = slice(batch, batch + 1), slice(head, head + 1)
                    ours = slice(batch, batch + 1), slice(head * group, (head + 1) * group)
                    leaves = [
                        x[at].float().requires_grad_()
                        for x, at in ((self.q, ours), (self.k, own), (self.v, own))
                    ]
                    mask = None if self.bias is None else self.bias[ours]
                    out = attention_reference(
                        *leaves, mask, causal=shape.causal, window=shape.window,
                        align="lower_right" if shape.lower_right else "upper_left",
                    )  # fmt: skip
                    gradients = torch.autograd.grad(out, leaves, self.grad[ours].float())
                    for whole, part, at in zip(
                        found, (out.detach(), *gradients), (ours, ours, own, own), strict=True
                    ):
                        whole[at] = part
        return tuple(found)


def prepare() -> None:
    """Make this process one that compiles launches instead of running them, for sm_90, on CPU tensors."""
    from benchmarks.kernels import aot

    torch.set_num_threads(1)
    aot.pretend(90, 132)
    aot.Compiled(90).install()


def _timed_shape(trial: Trial) -> Shape:
    batch, heads, tokens = trial.shape or SHAPES[trial.dim]
    return Shape(batch, heads, heads, tokens, tokens, trial.dim, causal=True)


def _compile(shape: Shape, kernels: tuple[str, ...]) -> str:
    try:
        problem = Problem(shape, "cpu")
        if "forward" in kernels:
            problem.forward()
        if kernels != ("forward",):
            problem.backward(*problem.untouched())
    except Exception as failure:  # noqa: BLE001
        return f"{type(failure).__name__}: {failure}".strip().replace("\n", " ")[-160:]
    return ""


def compile_ahead(wanted: list[Trial]) -> str:
    """Compile a trial's kernel; what went wrong, or nothing."""
    (trial,) = wanted
    _use({(trial.kernel, trial.dim): trial.parameters})
    return _compile(_timed_shape(trial), (trial.kernel,))


def compile_case(case: Shape, chosen: Parameters) -> str:
    """Compile what a comparison launches, with the parameters found and with the table's own."""
    for parameters in (chosen, {}):
        _use(parameters)
        if failure := _compile(case, KERNELS):
            return failure
    return ""


def compile_check(check: Shape) -> str:
    """Compile what a check launches."""
    _use(_PLAINLY)
    return _compile(check, KERNELS)


def _error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, by norms; infinite where a result is no number."""
    size = float((got.float() - wanted.float()).norm() / wanted.float().norm())
    return size if size == size else float("inf")


class Server:
    """The state of the process that times."""

    def __init__(self) -> None:
        self.problems: dict[int, tuple[Problem, tuple[torch.Tensor, ...], Any]] = {}

    def time(self, trial: Trial) -> dict[str, Any]:
        """Median ms of the forward, or of the whole backward with this kernel in it, and its error."""
        from advisor.kernels.bench.timing import median_ms

        if trial.dim not in self.problems:
            problem = Problem(_timed_shape(trial), "cuda")
            _use({})
            self.problems[trial.dim] = problem, sdpa_results(problem, "flash"), problem.forward()
        problem, wanted, saved = self.problems[trial.dim]
        _use({(trial.kernel, trial.dim): trial.parameters})
        if trial.kernel == "forward":
            call: Callable[[], Any] = problem.forward
            pairs = [(call()[0], wanted[0])]
        else:

            def call() -> Any:
                return problem.backward(*saved)

            gradients = list(zip(call(), wanted[1:], strict=True))
            pairs = gradients[:1] if trial.kernel == "query_gradient" else gradients[1:]
        size = max(_error(*pair) for pair in pairs)
        return {"ms": median_ms([call], 12), "error_size": size}

    def compare(self, request: tuple[Shape, Parameters]) -> dict[str, Any]:
        """One line: forward and forward with backward of ours, now and then, and of PyTorch's backends."""
        from advisor.kernels.bench.timing import median_ms

        case, chosen = request
        self.problems.clear()
        problem = Problem(case, "cuda")
        parts = []
        for name, parameters in (("ours", chosen), ("now", {})):
            _use(parameters)
            pair = median_ms([problem.forward], 10), median_ms([problem.both], 10)
            parts.append(f"{name} {pair[0]:.4f} {pair[1]:.4f}")
        for backend in ("flash", "cudnn", "efficient"):
            try:
                calls = sdpa_calls(problem, backend)
                pair = median_ms([calls[0]], 10), median_ms([calls[1]], 10)
                parts.append(f"{backend} {pair[0]:.4f} {pair[1]:.4f}")
            except RuntimeError:
                continue
        return {"line": " | ".join(parts)}

    def check(self, check: Shape) -> dict[str, Any]:
        """One line: the largest error of output and gradients, beside that of the kernels without roles."""
        problem = Problem(check, "cuda")
        wanted = problem.reference()
        errors = []
        for parameters in (_PLAINLY, {}):
            _use(cast(Parameters, parameters))
            errors.append([_error(*pair) for pair in zip(problem.both(), wanted, strict=True)])
        right = all(mine <= 1.5 * other + 1e-4 for mine, other in zip(*errors, strict=True))
        shown = ["/".join(f"{e:.1e}" for e in each) for each in errors]
        return {"line": f"{'right' if right else 'WRONG'}: {shown[0]}, now {shown[1]}"}


def sdpa_calls(problem: Problem, backend: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """PyTorch's forward, and forward with backward, on one backend."""
    from advisor.kernels.bench.attention import BACKENDS, sdpa

    shape = problem.shape
    leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    options: dict[str, Any] = {"is_causal": shape.causal}
    if shape.mask or shape.window:
        seen = torch.ones(shape.n, shape.m, device="cuda", dtype=torch.bool)
        if shape.causal:
            seen = seen.tril()
        if shape.window:
            seen = seen.triu(-shape.window[0])
        mask = problem.mask
        if mask is None:
            mask = seen
        elif mask.dtype == torch.bool:
            mask = mask & seen
        else:
            mask = mask.masked_fill(~seen, -torch.inf)
        options = {"attn_mask": mask}
    call = sdpa(BACKENDS[backend], **options)

    def forward() -> Any:
        with torch.no_grad():
            return call(*leaves)

    def both() -> Any:
        out = call(*leaves)
        return (out, *torch.autograd.grad(out, leaves, problem.grad))

    forward()
    return forward, both


def sdpa_results(problem: Problem, backend: str) -> tuple[torch.Tensor, ...]:
    """Output and gradients of PyTorch's attention."""
    return tuple(x.detach() for x in sdpa_calls(problem, backend)[1]())


def serve(pipe: Connection) -> None:
    """Answer requests until the pipe closes; a fault of the GPU is fatal to this process."""
    server = Server()
    while True:
        try:
            name, argument = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(server, name)(argument)
            torch.cuda.synchronize()
        except Exception as failure:  # noqa: BLE001
            answer = {"error": f"{type(failure).__name__}: {failure}".replace("\n", " ")}
            answer["fatal"] = "CUDA error" in answer["error"]
        pipe.send(answer)
