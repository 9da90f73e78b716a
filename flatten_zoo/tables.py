"""Tables that commands print."""
import csv
import io
from collections.abc import Iterable

__all__ = ['Table', 'as_csv', 'as_text']

Table = tuple[list[str], list[list[str]]]  # header and rows


def as_text(header: list[str], rows: Iterable[list[str]]) -> str:
    """Aligned columns, the first to the left and the others, which are figures as a rule, to the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return '\n'.join(
        '  '.join(cell.rjust(width) if i else cell.ljust(width)
                  for i, (cell, width) in enumerate(zip(line, widths, strict=True))).rstrip()
        for line in lines)


def as_csv(header: list[str], rows: Iterable[list[str]]) -> str:
    """Comma-separated values, without a newline at the end."""
    out = io.StringIO()
    csv.writer(out, lineterminator='\n').writerows([header, *rows])
    return out.getvalue().removesuffix('\n')
