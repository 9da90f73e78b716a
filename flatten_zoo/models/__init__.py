from .attention_resnet import AttentionResNet

__all__ = ['AttentionResNet']
