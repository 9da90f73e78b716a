"""Tables that commands print."""

import csv
import io
from collections.abc import Iterable

__all__ = ['Table', 'as_csv', 'as_text']

Table = tuple[list[str], list[list[str]]]  # header and rows


def as_text(header: list[str], rows: Iterable[list[str]]) -> str:
    """Aligned columns, figures to the right and words to the left."""
    lines = [header, *rows]
    columns = [
        [
            cell.rjust(max(map(len, column))) if _is_figures(column[1:]) else cell.ljust(max(map(len, column)))
            for cell in column
        ]
        for column in zip(*lines, strict=True)
    ]
    return '\n'.join('  '.join(line).rstrip() for line in zip(*columns, strict=True))


def _is_figures(cells: Iterable[str]) -> bool:
    return any(cell[:1].isdigit() for cell in cells)


def as_csv(header: list[str], rows: Iterable[list[str]]) -> str:
    """Comma-separated values, without a newline at the end."""
    out = io.StringIO()
    csv.writer(out, lineterminator='\n').writerows([header, *rows])
    return out.getvalue().removesuffix('\n')
