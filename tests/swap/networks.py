"""Modules as model libraries write them, in small."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LlamaNorm(nn.Module):
    """Rounds to the input's dtype before the weight."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        variance = hidden.pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden.to(dtype)


class GemmaNorm(nn.Module):
    """Adds 1 to the weight, and rounds at the end."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class T5Norm(nn.Module):
    """Casts only for half-precision weights."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        variance = hidden.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden = hidden * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden = hidden.to(self.weight.dtype)
        return self.weight * hidden


class HiddenEpsilonNorm(nn.Module):
    """LayerNorm whose eps is written into the code, and whose parameters have other names."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.g * centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() + self.b


class DtypeEpsilonNorm(nn.Module):
    """RMSNorm whose eps is that of the input's dtype."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        eps = torch.finfo(x.dtype).eps
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * self.weight).type_as(x)


class EpsilonOutside(LlamaNorm):
    """No RMSNorm: eps outside the root."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Scale(nn.Module):
    """No norm at all."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class UnbiasedNorm(Scale):
    """Divides by n - 1."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + 1e-5).sqrt()


class LlamaMLP(nn.Module):
    def __init__(self, size: int, inner: int, f: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.act_fn = f or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class MetaMLP(nn.Module):
    """As Meta names them, with a function for the activation."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(size, inner, bias=False)
        self.w2 = nn.Linear(inner, size, bias=False)
        self.w3 = nn.Linear(size, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class PhiMLP(nn.Module):
    """Gate and linear part in one layer."""

    def __init__(self, size: int, inner: int, gate_first: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(size, 2 * inner)
        self.down_proj = nn.Linear(inner, size)
        self.gate_first = gate_first

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.gate_up_proj(x).chunk(2, dim=-1)
        gate, up = (a, b) if self.gate_first else (b, a)
        return self.down_proj(up * F.gelu(gate))


class Block(nn.Module):
    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.norm = LlamaNorm(size)
        self.mlp = LlamaMLP(size, 2 * size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Blocks with a final norm and a head."""

    def __init__(self, depth: int = 2, size: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size) for _ in range(depth))
        self.norm = LlamaNorm(size)
        self.head = nn.Linear(size, classes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
