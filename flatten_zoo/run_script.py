"""Other people's scripts, with the zoo's models registered."""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import UsageError

__all__ = ['run_script']


def run_script(script: str | Path, arguments: Sequence[str] = ()) -> None:
    """Run a Python script as `python SCRIPT ARGUMENTS` would, in this process, where the zoo is imported already.

    `sys.argv` and `sys.path` stay as the script sees them; its `SystemExit` and other exceptions pass through.

    Args:
        script: The script's file.
        arguments: Its arguments.

    Raises:
        UsageError: There is no such file.
    """
    path = Path(script)
    if not path.is_file():
        raise UsageError(f"there is no script '{script}'")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(script), run_name='__main__')
