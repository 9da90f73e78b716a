"""Pages of the site that stand elsewhere: in the repository's root, and in the commands' help."""

import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File

from flatten_zoo.cli import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = {'README.md': 'index.md', 'CHANGELOG.md': 'changelog.md', 'CONTRIBUTING.md': 'contributing.md'}


def on_files(files, config):
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding='utf-8')))
    files.append(File.generated(config, 'commands.md', content=_commands()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to pages have another way to go in the site than in the repository."""
    if page.file.src_uri in PAGES.values():
        markdown = markdown.replace('](docs/', '](')
    for source, target in PAGES.items():
        markdown = re.sub(rf'\]\((?:\.\./)?((?:\.\./)*){re.escape(source)}', rf'](\1{target}', markdown)
    return markdown


def _commands():
    environment = {**os.environ, 'COLUMNS': '100', 'NO_COLOR': '1'}
    text = ['# Commands\n\n`flatten-zoo COMMAND --help` prints what stands here.\n']
    for name in COMMANDS:
        help = subprocess.run(
            [sys.executable, '-m', 'flatten_zoo', name, '--help'],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        text.append(f'## flatten-zoo {name}\n\n```text\n{help.rstrip()}\n```\n')
    return '\n'.join(text)
