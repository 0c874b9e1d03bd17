"""Small models written the way people write them, whole training steps included."""

import math

import torch
import torch.nn.functional as F
from pytorch_lightning import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

V, T, C, H = 19, 8, 32, 2


class CausalSelfAttention(nn.Module):
    """Explicit attention over a packed projection, with the mask in a buffer."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(2 * T, 2 * T)).view(1, 1, 2 * T, 2 * T))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(c, dim=2)
        q, k, v = (z.view(b, t, H, c // H).transpose(1, 2) for z in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(scores, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class NewGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class GPTBlock(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(C), CausalSelfAttention(dropout), nn.LayerNorm(C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), NewGELU(), nn.Linear(4 * C, C), nn.Dropout(dropout))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(LightningModule):
    """A GPT with its loss in `training_step`, which logs."""

    def __init__(self, layers=1, dropout=0.0, checkpointed=False):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(2 * T, C)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList([GPTBlock(dropout) for _ in range(layers)])
        self.ln_f, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        self.checkpointed = checkpointed

    def forward(self, tokens):
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.ln_f(x))

    def training_step(self, batch, _index):
        tokens, targets = batch
        logits = self(tokens)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), eps

    def forward(self, hidden):
        dtype = hidden.dtype
        hidden = hidden.to(torch.float32)
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden.to(dtype)


class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2).float() / dim))

    @torch.no_grad()
    def forward(self, x, positions):
        inv_freq = self.inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1)
        with torch.autocast(device_type=x.device.type, enabled=False):
            freqs = (inv_freq @ positions[:, None, :].float()).transpose(1, 2)
            emb = torch.cat((freqs, freqs), dim=-1)
            return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def repeat_kv(x, n):
    b, h, t, d = x.shape
    return x[:, :, None, :, :].expand(b, h, n, t, d).reshape(b, h * n, t, d)


class LlamaAttention(nn.Module):
    """Grouped attention with rotary positions and an added mask, weights in fp32."""

    def __init__(self, heads=4, kv_heads=2):
        super().__init__()
        self.dim, self.groups = C // heads, heads // kv_heads
        self.q_proj, self.o_proj = nn.Linear(C, C, bias=False), nn.Linear(C, C, bias=False)
        self.k_proj = nn.Linear(C, kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(C, kv_heads * self.dim, bias=False)

    def forward(self, x, cos, sin, mask):
        shape = (*x.shape[:-1], -1, self.dim)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q, k = (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)
        k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)
        weights = torch.matmul(q, k.transpose(2, 3)) * self.dim**-0.5
        weights = weights + mask[:, :, :, : k.shape[-2]]
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = F.dropout(weights, p=0.0, training=self.training)
        out = torch.matmul(weights, v).transpose(1, 2).contiguous()
        return self.o_proj(out.reshape(*x.shape[:-1], -1).contiguous())


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(C, 48, bias=False), nn.Linear(C, 48, bias=False)
        self.down_proj = nn.Linear(48, C, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(C), RMSNorm(C)
        self.self_attn, self.mlp = LlamaAttention(), LlamaMLP()

    def forward(self, x, cos, sin, mask):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Layers and loss as model libraries have them; the mask is built from constants."""

    def __init__(self, layers=1):
        super().__init__()
        self.embed, self.rotary = nn.Embedding(V, C), Rotary(C // 4)
        self.layers = nn.ModuleList([LlamaLayer() for _ in range(layers)])
        self.norm, self.lm_head = RMSNorm(C), nn.Linear(C, V, bias=False)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        t = tokens.shape[1]
        mask = torch.full((t, t), torch.finfo(x.dtype).min, device=x.device)
        mask = torch.triu(mask, diagonal=1)
        mask *= torch.arange(t, device=x.device) > torch.arange(t, device=x.device).reshape(-1, 1)
        mask = mask[None, None, :, :].expand(tokens.shape[0], 1, -1, -1)
        cos, sin = self.rotary(x, torch.arange(t, device=x.device)[None])
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        logits = self.lm_head(self.norm(x)).float()
        shifted, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return F.cross_entropy(shifted.view(-1, V), labels.view(-1))


class ViTBlock(nn.Module):
    """Heads out of one packed projection, no mask, exact GELU."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C, eps=1e-6), nn.LayerNorm(C, eps=1e-6)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 2 * C), nn.GELU(), nn.Linear(2 * C, C))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4).unbind(0)
        q = q * (c // H) ** -0.5
        attn = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        x = x + self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))
        return x + self.mlp(self.norm2(x))


class BertBlock(nn.Module):
    """Post-norm, an added mask of padding, dropout in the residual branches."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(C, C) for _ in range(4))
        self.norm, self.out_norm = nn.LayerNorm(C, eps=1e-12), nn.LayerNorm(C, eps=1e-12)
        self.inner, self.outer, self.dropout = nn.Linear(C, 2 * C), nn.Linear(2 * C, C), nn.Dropout(dropout)

    def heads(self, x):
        return x.view(*x.shape[:-1], H, C // H).permute(0, 2, 1, 3)

    def forward(self, x, attention_mask):
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        scores = torch.matmul(self.heads(self.query(x)), self.heads(self.key(x)).transpose(-1, -2))
        probs = self.dropout(F.softmax(scores / math.sqrt(C // H) + mask, dim=-1))
        context = torch.matmul(probs, self.heads(self.value(x))).permute(0, 2, 1, 3).contiguous()
        x = self.norm(self.dropout(self.dense(context.view(*x.shape))) + x)
        return self.out_norm(self.dropout(self.outer(F.gelu(self.inner(x)))) + x)


def batch(size=2, length=T):
    """Tokens and targets."""
    return torch.randint(0, V, (size, length)), torch.randint(0, V, (size, length))
