"""Downloading one large file from an address that may be slow and unreliable."""

import http.client
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

from tqdm import tqdm

from ..errors import UsageError

__all__ = ['download']

TRIES = 5
TIMEOUT = 30  # seconds without a byte
CHUNK_SIZE = 1 << 18


def download(address: str, path: Path, wait: float = 1.0) -> None:
    """Download a file with a progress bar; a connection that breaks is taken up again where it broke.

    Args:
        address: Address of the file.
        path: Where to write it. What is there after an error is no whole file.
        wait: Seconds before the second try, doubled for each one after.

    Raises:
        UsageError: The server can't be reached, refuses, or keeps breaking off.
    """
    with path.open('wb') as file, tqdm(desc=path.name, unit='B', unit_scale=True, unit_divisor=1024) as progress:
        for attempt in range(TRIES):
            try:
                return _receive(address, file, progress)
            except (OSError, http.client.HTTPException) as e:
                error = e
                if isinstance(e, urllib.error.HTTPError) and e.code < 500 and e.code != 429:
                    break
            time.sleep(wait * 2**attempt if attempt < TRIES - 1 else 0)
    raise UsageError(f'cannot download {address}: {error}; check the connection and try again') from error


def _receive(address: str, file: IO[bytes], progress: tqdm) -> None:
    """Append what the file lacks, or all of it anew from servers that can't continue."""
    done = file.tell()
    request = urllib.request.Request(address, headers={'User-Agent': 'flatten_zoo'})
    if done:
        request.add_header('Range', f'bytes={done}-')
    with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
        if response.status != http.client.PARTIAL_CONTENT:
            done = file.seek(0)
            file.truncate()
            progress.reset()
        length = response.headers.get('Content-Length')
        total = None if length is None else done + int(length)
        progress.total = total
        while chunk := response.read(CHUNK_SIZE):
            file.write(chunk)
            progress.update(len(chunk))
    if total is not None and file.tell() != total:
        raise ConnectionError(f'the connection broke after {file.tell()} of {total} bytes')
