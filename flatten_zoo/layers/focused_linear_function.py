"""Focused linear attention of given queries, keys and values as one function, with a hand-written backward pass.

It is bound by memory traffic, not by arithmetic. So the norms of the queries stay scalars per token instead of touching
whole maps, and what the backward pass needs beyond q, k and v is recomputed from a few numbers per token and head.
`plain_attention` is the same function in differentiable operations, for whatever transforms or records them.
"""

import torch
import torch.nn.functional as F
from timm.layers import is_exporting, register_notrace_function
from torch.autograd import forward_ad

from .._torch import _are_functorch_transforms_active, is_legacy_batchedtensor

__all__ = ['depthwise_and_focused_attention', 'focus', 'inverse_softplus']


@torch.fx.wrap
@register_notrace_function  # reason: branches on the dtype
def _at_least_float32(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype == torch.float16 or x.dtype == torch.bfloat16 else x


def inverse_softplus(scale: torch.Tensor) -> torch.Tensor:
    """1 / softplus(scale), at least in float32."""
    return F.softplus(_at_least_float32(scale)).reciprocal()


def _range(u: torch.Tensor, norm: torch.Tensor, p: float) -> torch.Tensor:
    """A size of each token, such that powers of u over it, and their squares, neither overflow nor all vanish."""
    # Channels over the norm lie between C^-½ and 1 for the largest: C^¼ times that is centred, as long as p is small.
    return u.amax(dim=-1, keepdim=True) if p > 8 else norm * u.shape[-1] ** -0.25


def focus(
    x: torch.Tensor, inverse_scale: torch.Tensor, p: float, folded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Direction w (..., C) and factor r (..., 1) of the focused function: f(x) = r · w, at least in float32."""
    x = _at_least_float32(x)
    inverse_scale = _at_least_float32(inverse_scale)
    u = torch.maximum(x, 1e-6 * inverse_scale) if folded else (F.relu(x) + 1e-6) * inverse_scale
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    # f does not depend on the range, so it is a constant to the gradient
    w = (u * _range(u, norm, p).detach().reciprocal()) ** p
    return w, norm * torch.linalg.vector_norm(w, dim=-1, keepdim=True).reciprocal()


def _by_head(x: torch.Tensor) -> bool:
    # On the CPU one product per head reads strided views where one for all would first copy them into heads. Elsewhere
    # launches cost more than copies, and an exported graph is to be small.
    return x.device.type == 'cpu' and not is_exporting()


def _outer(k: torch.Tensor, v: torch.Tensor, num_heads: int) -> torch.Tensor:
    """kᵀ v of every head, (B, heads, d, d'), for k (B, N, heads · d) and v (B, N, heads · d')."""
    if not torch.jit.is_scripting() and _by_head(k):
        pairs = zip(k.chunk(num_heads, dim=-1), v.chunk(num_heads, dim=-1), strict=True)
        return torch.stack([torch.bmm(k_head.transpose(1, 2), v_head) for k_head, v_head in pairs], dim=1)
    k = k.unflatten(-1, [num_heads, -1]).permute(0, 2, 3, 1)
    return k @ v.unflatten(-1, [num_heads, -1]).transpose(1, 2)


def _apply(q: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """q times the context of its head, (B, N, heads · d'), for q (B, N, heads · d) and context (B, heads, d, d')."""
    num_heads = context.shape[1]
    if not torch.jit.is_scripting() and _by_head(q):
        pairs = zip(q.chunk(num_heads, dim=-1), context.unbind(1), strict=True)
        return torch.cat([torch.bmm(q_head, context_head) for q_head, context_head in pairs], dim=-1)
    return (q.unflatten(-1, [num_heads, -1]).transpose(1, 2) @ context).transpose(1, 2).flatten(2)


def _add_applied(out: torch.Tensor, q: torch.Tensor, context: torch.Tensor) -> None:
    """out += `_apply(q, context)`."""
    if _by_head(q):
        num_heads = context.shape[1]
        for out_head, q_head, context_head in zip(
            out.chunk(num_heads, dim=-1), q.chunk(num_heads, dim=-1), context.unbind(1), strict=True
        ):
            torch.baddbmm(out_head, q_head, context_head, out=out_head)
    else:
        out += _apply(q, context)


def _depthwise_conv(v: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    padding = weight.shape[-1] // 2
    v = v.permute(0, 3, 1, 2)
    out = F.conv2d(v, weight.to(v.dtype), bias.to(v.dtype), padding=[padding, padding], groups=weight.shape[0])
    return out.permute(0, 2, 3, 1)


def _patches(x: torch.Tensor, height: int, width: int, num_prefix_tokens: int) -> torch.Tensor:
    """The (B, H, W, C) map that x is, or that its tokens are but for the first ones."""
    return x if x.ndim == 4 else x[:, num_prefix_tokens:].reshape(x.shape[0], height, width, x.shape[2])


def _tokens(maps: torch.Tensor, num_prefix_tokens: int) -> torch.Tensor:
    """A (B, H, W, C) map as tokens, after as many zero ones."""
    tokens = maps.flatten(1, 2)
    return F.pad(tokens, [0, 0, num_prefix_tokens, 0]) if num_prefix_tokens > 0 else tokens


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positional_encoding: torch.Tensor,
    inverse_scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    p: float,
    num_heads: int,
    num_prefix_tokens: int = 0,
    folded: bool = False,
) -> torch.Tensor:
    """`depthwise_and_focused_attention` in differentiable operations."""
    shape, H, W = q.shape, positional_encoding.shape[1], positional_encoding.shape[2]
    depthwise = _tokens(_depthwise_conv(_patches(v, H, W, num_prefix_tokens), weight, bias), num_prefix_tokens)
    q, k, v = q.flatten(1, -2), k.flatten(1, -2), v.flatten(1, -2)
    N = q.shape[1]
    q, r_q = focus(q, inverse_scale, p, folded)
    k, r_k = focus(k + _tokens(positional_encoding, num_prefix_tokens), inverse_scale, p, folded)
    k = k * r_k
    k_mean = k.mean(dim=1, keepdim=True)
    normalizer = (q * k_mean).unflatten(-1, [num_heads, -1]).sum(dim=-1, keepdim=True)
    normalizer = normalizer + (1e-6 * r_q.reciprocal()).unsqueeze(-1)
    inverse_normalizer = normalizer.reciprocal()
    if v.dtype == torch.float16:
        # Two weighted means, so that every factor fits half precision: each channel of k averages v over the positions,
        # and each q averages the channels. 1 / N goes half to k and half to v. The result does not depend on `typical`.
        typical = k_mean.detach().clamp(min=1e-30)
        q = ((q * typical).unflatten(-1, [num_heads, -1]) * inverse_normalizer).flatten(2)
        context = _outer((k / (typical * N**0.5)).to(v.dtype), v * N**-0.5, num_heads)
        return (_apply(q.to(v.dtype), context) + depthwise).reshape(shape)
    context = _outer(k.to(v.dtype), v, num_heads) * (1 / N)
    out = _apply(q.to(v.dtype), context).unflatten(-1, [num_heads, -1]) * inverse_normalizer  # a pass less than on q
    return (out.flatten(2).to(v.dtype) + depthwise).reshape(shape)


def _positive(
    x: torch.Tensor, inverse_scale: torch.Tensor, folded: bool = False, overwrite: bool = False
) -> torch.Tensor:
    """u of `focus`, on one buffer: that of x, where it may be overwritten."""
    epsilon = 1e-6 * _at_least_float32(inverse_scale)
    if folded:
        return torch.maximum(_at_least_float32(x), epsilon)
    u = _at_least_float32(x.relu_() if overwrite else x.relu())
    return torch.addcmul(epsilon, u, inverse_scale, out=u)


def _focus_in_place(u: torch.Tensor, p: float) -> tuple[torch.Tensor, ...]:
    """Turn u into the direction w of `focus`; returns range and norm of u, and the factor r."""
    norm = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
    size = _range(u, norm, p)
    u.mul_(size.reciprocal()).pow_(p)
    return size, norm, norm / torch.linalg.vector_norm(u, dim=-1, keepdim=True)


def _attention_in_place(
    q, k, v, positional_encoding, inverse_scale, weight, bias, p, num_heads, num_prefix_tokens, folded=False
) -> tuple[torch.Tensor, ...]:
    """`plain_attention` on two buffers, and what its backward pass needs: numbers per token and per head."""
    with torch.autocast(q.device.type, enabled=False):
        shape, H, W = q.shape, positional_encoding.shape[1], positional_encoding.shape[2]
        out = _tokens(_depthwise_conv(_patches(v, H, W, num_prefix_tokens), weight, bias), num_prefix_tokens)
        q, k, v = (x.flatten(1, -2) for x in (q, k, v))
        N = q.shape[1]
        q = _positive(q, inverse_scale, folded)
        k = _positive(k + _tokens(positional_encoding, num_prefix_tokens), inverse_scale, folded, overwrite=True)
        size_q, norm_q, r_q = _focus_in_place(q, p)
        size_k, norm_k, r_k = _focus_in_place(k, p)
        k.mul_(r_k)
        k_mean = k.mean(dim=1)
        context = _outer(k.to(v.dtype), v, num_heads).mul_(1 / N)
        normalizer = (q * k_mean.unsqueeze(1)).unflatten(-1, [num_heads, -1]).sum(dim=-1) + 1e-6 / r_q
        q.unflatten(-1, [num_heads, -1]).div_(normalizer.unsqueeze(-1))
        _add_applied(out, q.to(v.dtype), context)
        return out.view(shape), size_q, norm_q, r_q, size_k, norm_k, r_k, k_mean, context, normalizer


class _Attention(torch.autograd.Function):
    """`plain_attention` that keeps q, k, v and numbers per token and head."""

    @staticmethod
    def forward(*args):
        return _attention_in_place(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.p, ctx.num_heads, ctx.num_prefix_tokens = inputs
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, *_):
        if grad is None:
            return (None,) * 10
        options = ctx.p, ctx.num_heads, ctx.num_prefix_tokens
        saved = ctx.saved_tensors  # once: gradient checkpointing gives them only once
        inputs, saved = saved[:7], saved[7:]
        with torch.autocast(grad.device.type, enabled=False):
            if (
                torch.is_grad_enabled()
                or _are_functorch_transforms_active()
                or is_legacy_batchedtensor(grad)  # is_grads_batched=True
            ):
                grads = _differentiated(grad, inputs, ctx.needs_input_grad, options)
            else:
                grads = _attention_backward(grad, *inputs, *saved, *options, ctx.needs_input_grad)  # type: ignore[call-arg]  # mypy cannot count them
        return *grads, None, None, None


def _differentiated(grad, inputs, needed, options):
    """Gradients that can be differentiated or batched themselves."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # aliases, as an input may be computed from another one
        inputs = [x.view_as(x) if need else x for x, need in zip(inputs, needed, strict=False)]
        out = plain_attention(*inputs, *options)
    wanted = [x for x, need in zip(inputs, needed, strict=False) if need]
    grads = iter(torch.autograd.grad(out, wanted, grad, create_graph=create_graph))
    return [next(grads) if need else None for need in needed[:7]]


def _attention_backward(
    grad,
    q,
    k,
    v,
    positional_encoding,
    inverse_scale,
    weight,
    bias,
    size_q,
    norm_q,
    r_q,
    size_k,
    norm_k,
    r_k,
    k_mean,
    context,
    normalizer,
    p,
    num_heads,
    num_prefix_tokens,
    needed,
):
    """Gradients of the first seven arguments by hand, on as few buffers as there are."""
    shape, (_, H, W, C) = q.shape, positional_encoding.shape
    padding = weight.shape[-1] // 2
    grad_v, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        _patches(grad, H, W, num_prefix_tokens).permute(0, 3, 1, 2),
        _patches(v, H, W, num_prefix_tokens).permute(0, 3, 1, 2),
        weight.to(v.dtype),
        [C],
        [1, 1],
        [padding, padding],
        [1, 1],
        False,
        [0, 0],
        C,
        [True, needed[5], needed[6]],
    )
    grad_v = _tokens(grad_v.permute(0, 2, 3, 1), num_prefix_tokens)
    grad, q, k, v = (x.flatten(1, -2) for x in (grad, q, k, v))
    B, N, _ = q.shape

    def recompute(x, size):
        """u and w of `_focus_in_place`."""
        u = _positive(x, inverse_scale)
        return u, (u * size.reciprocal()).pow_(p)

    def through_focus(grad, along_w, along_u, x, u, w):
        """Gradients of x and, over all tokens, of the inverse scale, where that of u is
        p · (w / u) · (grad - along_w · w) + along_u · u. Overwrites grad and w."""
        grad.addcmul_(along_w, w, value=-1).mul_(w)
        grad_u = torch.mul(along_u, u, out=w).addcdiv_(grad, u, value=p)
        grad_inverse_scale = torch.mul(grad_u, u, out=grad).sum(dim=(0, 1)) / inverse_scale if needed[4] else None
        return torch.ops.aten.threshold_backward(grad_u.mul_(inverse_scale).to(x.dtype), x, 0), grad_inverse_scale

    # Queries: the output is (w / normalizer) context, and the normalizer w · k_mean + ε ‖w‖ / ‖u‖
    u, w = recompute(q, size_q)
    by_head = normalizer.unsqueeze(-1)
    weights = (w.unflatten(-1, [num_heads, -1]) / by_head).flatten(2)
    grad_context = _outer(weights.to(v.dtype), grad, num_heads)
    grad_w = _at_least_float32(_apply(grad, context.transpose(2, 3)))
    grad_normalizer = weights.mul_(grad_w).unflatten(-1, [num_heads, -1]).sum(dim=-1) / -normalizer
    grad_k_mean = _outer(w, grad_normalizer, num_heads).reshape(B, 1, C)
    grad_w.unflatten(-1, [num_heads, -1]).div_(by_head).addcmul_(
        grad_normalizer.unsqueeze(-1), k_mean.view(B, 1, num_heads, -1)
    )
    radial = grad_normalizer.sum(dim=-1, keepdim=True) * -1e-6 / norm_q**2
    grad_q, grad_inverse_scale = through_focus(grad_w, radial * r_q, radial / r_q, q, u, w)

    # Keys: the context is fᵀ v / N, with f = r w of the norm of u
    x = k + _tokens(positional_encoding, num_prefix_tokens)
    u, f = recompute(x, size_k)
    f.mul_(r_k)
    grad_v.add_(_apply(f.to(v.dtype), grad_context), alpha=1 / N)
    grad_f = _at_least_float32(_apply(v, grad_context.transpose(2, 3))).add_(grad_k_mean).mul_(1 / N)
    radial = (f * grad_f).sum(dim=-1, keepdim=True) / norm_k**2
    grad_k, grad_inverse_scale_of_k = through_focus(grad_f, radial, radial, x, u, f)
    grad_positional_encoding = None
    if needed[3]:
        grad_of_patches = _patches(grad_k.view(shape), H, W, num_prefix_tokens)
        grad_positional_encoding = grad_of_patches.sum(dim=0, keepdim=True).to(positional_encoding.dtype)
    if needed[4]:
        grad_inverse_scale = grad_inverse_scale + grad_inverse_scale_of_k
    if needed[5]:
        grad_weight = grad_weight.to(weight.dtype)
    if needed[6]:
        grad_bias = grad_bias.to(bias.dtype)
    return (
        grad_q.view(shape),
        grad_k.view(shape).to(k.dtype),
        grad_v.view(shape),
        grad_positional_encoding,
        grad_inverse_scale,
        grad_weight,
        grad_bias,
    )


@register_notrace_function  # reason: looks at what records or transforms it
def depthwise_and_focused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positional_encoding: torch.Tensor,
    inverse_scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    p: float,
    num_heads: int,
    num_prefix_tokens: int = 0,
    folded: bool = False,
) -> torch.Tensor:
    """The sum of focused linear attention, before its projection, and of a depthwise convolution of the values.

    Args:
        q, k, v: Queries, keys and values, each a map (B, H, W, C), or tokens (B, num_prefix_tokens + H · W, C) of
            which the first ones are on no grid: attention is over all, the rest on the map alone.
        positional_encoding: What is added to the keys, (1, H, W, C).
        inverse_scale: What relu(q) and relu(k) are multiplied by, (1, 1, C), at least in float32.
        weight: Kernels of the convolution, (C, 1, odd size, the same size).
        bias: Its bias, (C,).
        p: Power of the focused function.
        num_heads: Number of heads, a divisor of C.
        num_prefix_tokens: Number of first tokens that are on no grid; 0 for a map.
        folded: q and k are x' = (x + 1e-6) · inverse_scale already, and (relu(x) + 1e-6) · inverse_scale is but
            max(x', 1e-6 · inverse_scale).

    Returns:
        Of the shape of q, in the type of v.
    """
    if not torch.jit.is_scripting():
        inputs = (q, k, v, positional_encoding, inverse_scale, weight, bias)
        if not (
            v.dtype == torch.float16  # its range takes another arrangement
            or v.is_meta  # nothing is computed, and what counts operations shall find them
            or torch.compiler.is_compiling()
            or torch.jit.is_tracing()
            or _are_functorch_transforms_active()
            or any(forward_ad.unpack_dual(x).tangent is not None for x in inputs)
        ):
            if not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
                return _attention_in_place(*inputs, p, num_heads, num_prefix_tokens, folded)[0]
            if not folded:
                return _Attention.apply(*inputs, p, num_heads, num_prefix_tokens)[0]
    return plain_attention(
        q, k, v, positional_encoding, inverse_scale, weight, bias, p, num_heads, num_prefix_tokens, folded
    )
