"""The engine behind `train.py` and `validate.py`, and the small embedded data set."""
