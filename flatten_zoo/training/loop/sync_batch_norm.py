"""Batch norm over the images of all processes, on CPUs as well, where torch's own does not run."""

import torch
import torch.distributed as dist
from timm.layers import convert_sync_batchnorm
from torch import nn
from torch.nn.functional import batch_norm

from flatten_zoo._torch import _BatchNorm

__all__ = ['synchronize_batch_norm']


def synchronize_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """Let a model's batch norms take their statistics from the batches of all processes.

    Args:
        model: Model on the device.
        device: Where it is.

    Returns:
        The model, whose parameters stay the same objects.
    """
    if device.type != 'cpu':
        return convert_sync_batchnorm(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, _BatchNorm):
            model.set_submodule(name, _SyncBatchNormOnCPU(layer))
    return model


class _SumOverProcesses(torch.autograd.Function):
    """Sum of a tensor over the processes; its gradient is the sum of theirs.

    torch's own, `torch.distributed.nn.functional.all_reduce`, is deprecated for a private module.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return _SumOverProcesses.apply(grad)


class _SyncBatchNormOnCPU(_BatchNorm):
    """torch's and timm's batch norms, the latter with dropout and activation, in plain operators.

    Args:
        layer: Batch norm that this takes the place of, with its parameters, statistics and options.
    """

    def __init__(self, layer: _BatchNorm):
        nn.Module.__init__(self)
        vars(self).update(vars(layer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            x = self._normalize(x)
        else:
            x = batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, self.running_mean is None, eps=self.eps
            )
        for name in ('drop', 'act'):
            x = getattr(self, name, nn.Identity())(x)
        return x

    def _normalize(self, x: torch.Tensor) -> torch.Tensor:
        inner = [dim for dim in range(x.ndim) if dim != 1]
        per_channel = [-1 if dim == 1 else 1 for dim in range(x.ndim)]
        values = x.float()
        count = _SumOverProcesses.apply(values.new_tensor(values.numel() // values.shape[1]))
        mean = _SumOverProcesses.apply(values.sum(inner)) / count
        centred = values - mean.view(per_channel)
        var = _SumOverProcesses.apply(centred.square().sum(inner)) / count
        if self.track_running_stats:
            self._follow(mean.detach(), var.detach() * count / (count - 1))
        values = centred * (var + self.eps).rsqrt().view(per_channel)
        if self.affine:
            values = values * self.weight.view(per_channel) + self.bias.view(per_channel)
        return values.to(x.dtype)

    running_mean: torch.Tensor
    running_var: torch.Tensor
    num_batches_tracked: torch.Tensor

    @torch.no_grad()
    def _follow(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        self.num_batches_tracked += 1
        weight = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), weight)
        self.running_var.lerp_(var.to(self.running_var.dtype), weight)
