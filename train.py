"""Train an image classifier: `python train.py --help`."""
import sys

from flatten_zoo.errors import report_usage_errors
from flatten_zoo.training.train import main

if __name__ == '__main__':
    sys.exit(report_usage_errors(main))
