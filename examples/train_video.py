"""An R-C3D with efficient attention learns generated clips: `flatten-zoo train-dense video`, to start from."""

import sys

from flatten_zoo.cli import main

if __name__ == '__main__':
    sys.exit(main(['train-dense', 'video', *sys.argv[1:]]))
