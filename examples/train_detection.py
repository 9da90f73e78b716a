"""A Mask R-CNN with efficient attention learns generated shapes: `flatten-zoo train-dense detection`, to start from."""

import sys

from flatten_zoo.cli import main

if __name__ == '__main__':
    sys.exit(main(['train-dense', 'detection', *sys.argv[1:]]))
