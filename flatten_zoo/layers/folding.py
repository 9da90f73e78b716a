"""What `timm.utils.reparameterize_model` does to the layers here: constants become part of weights, for inference."""

from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

__all__ = ['inference_only', 'make_norms_foldable']


@torch.fx.wrap  # torchvision traces networks in training mode, only to look at them
def inference_only(x: torch.Tensor, training: bool) -> torch.Tensor:
    """x, outside training alone."""
    if training:
        raise RuntimeError(
            'a folded model cannot be trained: call eval() for inference; to train, keep the model as '
            'it was before reparameterize_model'
        )
    return x


class FoldedNorm(nn.Identity):
    """In the place of a batch norm that has become part of a convolution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return inference_only(x, self.training)


def make_norms_foldable(*modules: nn.Module) -> None:
    """Have `timm.utils.reparameterize_model` fold batch norms into the convolutions right before them.

    Networks and tensor names stay as they are. timm asks the children of all modules, in order: a convolution that is
    asked offers itself to its norm, so that nothing is folded where either has been replaced since.
    Running statistics are folded in whatever mode the network is; what is folded refuses to run in training mode.

    Args:
        modules: What runs one after the other. Modules within them run in their order.
    """
    leaves = [leaf for module in modules for leaf in module.modules() if next(leaf.children(), None) is None]
    for conv, norm in pairwise(leaves):
        if type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d:
            conv.fuse = partial(_offer, conv, norm)  # type: ignore[assignment]  # torch's modules hold anything


def _offer(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    norm.fuse = partial(_fold, conv, norm)  # type: ignore[assignment]
    return conv


def _fold(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Module:
    del norm.fuse
    if type(conv) is not nn.Conv2d or norm.running_mean is None or norm.running_var is None:
        return norm  # a parametrized weight; statistics of each batch
    del conv.fuse
    conv.weight, conv.bias = fuse_conv_bn_weights(
        conv.weight, conv.bias, norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    )
    return FoldedNorm().train(norm.training)
