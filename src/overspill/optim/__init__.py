"""Optimizer kernels: what they compute (reference.py) and how they are called (kernels.py).

Not here: torch.optim.Optimizer (train/), where state lives (tiers/). The fast path is the native core.
"""
