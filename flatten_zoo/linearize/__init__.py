"""Attention transfer: linear attention that keeps what a trained network knows."""
