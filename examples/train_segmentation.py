"""A UPerNet learns generated shapes: `flatten-zoo train-dense segmentation`, to start from."""

import sys

from flatten_zoo.cli import main

if __name__ == '__main__':
    sys.exit(main(['train-dense', 'segmentation', *sys.argv[1:]]))
