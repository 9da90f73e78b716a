"""Training of the dense networks: `flatten-zoo train-dense` and `validate-dense`.

What is learned is a `Task` (`task.py`): data, network, losses, scores and a picture, one file each. How it is learned
is `trainer.py`, the same for all.
"""
