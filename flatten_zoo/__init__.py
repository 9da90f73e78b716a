"""Efficient-attention vision backbones as ordinary timm models; importing the package registers them."""
