"""Matrix products in float32 on a CPU: oneDNN's, where they use the machine's widest instructions and PyTorch's do not.

PyTorch multiplies float32 matrices with MKL, which uses AVX-512 on Intel's processors only; oneDNN, which PyTorch
carries too and uses for 16-bit matrices, uses it on all that have it and is twice as fast there. Results differ in
rounding only. `ATEN_CPU_CAPABILITY=avx2` in the environment leaves everything to PyTorch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.cache
def wide() -> bool:
    """Whether oneDNN's product is there, right, and worth it on this machine."""
    if not (torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability().startswith("AVX512")):
        return False
    try:
        x, w = torch.arange(6.0).reshape(2, 3), torch.arange(12.0).reshape(4, 3)
        return torch.equal(_multiply(x, w), x @ w.T) and torch.equal(_multiply(x.T, w[:2].T), x.T @ w[:2])
    except (AttributeError, RuntimeError, TypeError):  # the operator has no public name, so another version may lack it
        return False


def _multiply(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [M, K] @ w [N, K].T + bias [N]."""
    if not (w.is_contiguous() or w.T.is_contiguous()):
        w = w.contiguous()  # other strides are right, but hundreds of times slower
    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")


def _suits(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0 and wide()


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] @ w [N, K].T, without gradient."""
    return _multiply(x, w) if _suits(x, w) else x @ w.T


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`."""
    if not _suits(x, weight):
        return torch.nn.functional.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Product.apply(x, weight, bias)
    return _multiply(x, weight, bias)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight if x.requires_grad else None)
        ctx.shape = x.shape
        return _multiply(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradient.flatten(0, -2)
        needs = ctx.needs_input_grad
        to_x = _multiply(gradient, weight.T).view(ctx.shape) if needs[0] else None
        to_weight = _multiply(gradient.T, x.flatten(0, -2).T) if needs[1] else None
        return to_x, to_weight, gradient.sum(0) if needs[2] else None
