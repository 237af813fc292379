"""Layers in place of a model's own, on a CPU: the same weights and results in less time, and less kept for gradients.

transformers writes a normalisation or a gated layer as a chain of elementwise operations. Automatic differentiation
keeps every link of it and goes back link by link, which on a CPU takes as long as the products in between. Here they
are one operation each, with its gradient by hand. What a layer computes is not guessed from its name: it is tried.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from apportion.lm.products import linear


def use(model: nn.Module) -> None:
    """Put these layers where a model has their like. Nothing is done on a GPU, whose own kernels are better."""
    if any(p.device.type != "cpu" for p in model.parameters()):
        return
    for layer in model.modules():
        kind: type[nn.Module] | None = None
        if type(layer) is nn.Linear:
            kind = Linear
        elif hasattr(layer, "act_fn") and _same(layer, Gated):
            kind = Gated
        elif type(layer).__name__.endswith("RMSNorm") and _same(layer, RMSNorm):
            kind = RMSNorm
        if kind is not None:
            layer.instead_of, layer.__class__ = type(layer), kind  # type: ignore[assignment]


@torch.no_grad()
def _same(layer: Any, kind: type[nn.Module]) -> bool:
    """Whether a layer computes, to rounding, what it would as one of `kind`."""
    try:
        size = layer.gate_proj.in_features if kind is Gated else layer.weight.shape[0]
        x = torch.randn(3, size, generator=torch.Generator().manual_seed(0)).to(next(layer.parameters()).dtype)
        own, ours = layer(x), kind.forward(layer, x)
    except (AttributeError, TypeError, RuntimeError, ValueError):
        return False
    near = 1e-5 if x.dtype == torch.float32 else 0.02
    return own.dtype == ours.dtype and float((own - ours).abs().max()) <= near * float(own.abs().max())


class Linear(nn.Linear):
    """A linear layer that multiplies as `products.linear` does."""

    def forward(self, input: Tensor) -> Tensor:
        """See torch.nn.Linear."""
        return linear(input, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d]."""
        eps = float(self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps)  # type: ignore[arg-type]
        return _Norm.apply(x, self.weight, eps) if torch.is_grad_enabled() else _normed(x, self.weight, eps)[0]


class Gated(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(_Gate.apply(gate, up) if torch.is_grad_enabled() else silu(gate, inplace=True).mul_(up))


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised x, and what it was multiplied with before the weight [..., 1] (float32)."""
    wide = x.float()
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = size.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight.to(x.dtype)), scale


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, scale = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        # Numbers of 16 bits are widened first: operations on two kinds are slow.
        gradient, one = gradient.float(), x.float() * scale  # one is of mean square 1
        to_weight = None
        if ctx.needs_input_grad[1]:
            to_weight = (gradient * one).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, to_weight, None
        to_one = gradient * weight.float()
        along = (to_one * one).mean(dim=-1, keepdim=True)
        return to_one.sub_(one.mul_(along)).mul_(scale).to(x.dtype), to_weight, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        to_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return to_gate, silu(gate).mul_(gradient)
