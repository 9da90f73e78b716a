"""Measure an image classifier: `python validate.py --help`."""

import os
import sys

os.environ.setdefault('OMP_WAIT_POLICY', 'passive')  # spinning threads starve the loader's processes of their cores

from flatten_zoo.errors import report_usage_errors  # noqa: E402
from flatten_zoo.training.validate import main  # noqa: E402

if __name__ == '__main__':
    sys.exit(report_usage_errors(main))
