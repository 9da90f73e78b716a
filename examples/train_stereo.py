"""A PSMNet learns generated pairs with efficient attention on its cost volume, and another one without it."""

import sys

from flatten_zoo.cli import main

if __name__ == '__main__':
    for attention in ('ea', 'none'):
        output = ['--attention', attention, '--output', f'output/stereo/{attention}']
        if status := main(['train-dense', 'stereo', *output, *sys.argv[1:]]):
            sys.exit(status)
