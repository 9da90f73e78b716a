"""Measure an image classifier: `python validate.py --help`."""
import sys

from flatten_zoo.errors import report_usage_errors
from flatten_zoo.training.validate import main

if __name__ == '__main__':
    sys.exit(report_usage_errors(main))
