"""What was predicted, as a table, CSV, JSON, JSON Lines and Parquet; features as arrays."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import UsageError, printable
from ..figures import check_path, save_arrays, written_whole
from ..tables import Table, as_csv

__all__ = [
    'EMBEDDING_FORMATS',
    'FORMATS',
    'Record',
    'check_file',
    'features',
    'predictions',
    'predictions_table',
    'predictions_text',
    'save_embeddings',
    'save_predictions',
]

FORMATS = ('csv', 'json', 'jsonl', 'parquet')
EMBEDDING_FORMATS = ('npz', 'parquet')

# filename; and a list each of index, label and prob, the most probable class first, or embedding
Record = dict[str, Any]


def predictions(names: Sequence[str], scores: torch.Tensor, labels: Sequence[str], topk: int) -> list[Record]:
    """The most probable classes of each picture.

    Args:
        names: Names of N pictures.
        scores: Class scores before the softmax, N × classes.
        labels: Names of the classes.
        topk: How many; at most all.
    """
    probabilities, indices = scores.softmax(1).topk(min(topk, len(labels)))
    return [
        {'filename': name, 'index': index, 'label': [labels[i] for i in index], 'prob': prob}
        for name, index, prob in zip(names, indices.tolist(), probabilities.tolist(), strict=True)
    ]


def features(names: Sequence[str], embeddings: torch.Tensor) -> list[Record]:
    """The features N × channels of N pictures."""
    return [{'filename': name, 'embedding': row.numpy()} for name, row in zip(names, embeddings, strict=True)]


def predictions_table(records: Sequence[Record]) -> Table:
    """Predictions for people: a line for each class, and the picture's name on its first."""
    rows = []
    for record in records:
        for rank, (label, prob) in enumerate(zip(record['label'], record['prob'], strict=True), 1):
            rows.append(['' if rank > 1 else printable(record['filename']), str(rank), f'{prob:.1%}', label])
    return ['image', 'rank', 'probability', 'class'], rows


def predictions_text(records: Sequence[Record], format: str) -> str:
    """Predictions as text in one of `FORMATS` but Parquet, without a newline at the end.

    In CSV, the rank of a class stands in the names of its columns.
    """
    if format == 'json':
        return json.dumps(records, indent=2)
    if format == 'jsonl':
        return '\n'.join(map(json.dumps, records))
    ranks = range(len(records[0]['index']))
    header = ['filename', *(f'{key}_{rank + 1}' for rank in ranks for key in ('index', 'label', 'prob'))]
    return as_csv(
        header,
        [
            [r['filename'], *(str(r[key][rank]) for rank in ranks for key in ('index', 'label', 'prob'))]
            for r in records
        ],
    )


def check_file(option: str, path: Path, formats: Sequence[str], format: str | None = None) -> str:
    """The format of a file to write, by its suffix unless it is given.

    Raises:
        UsageError: It is none of the formats, or can't be written there or without a package.
    """
    check_path(option, path, [path.suffix[1:].lower()] if format else formats)
    format = format or path.suffix[1:].lower()
    if format == 'parquet':
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError as e:
            raise UsageError(f"{option} '{path}' needs pyarrow: pip install 'flatten_zoo[parquet]'") from e
    return format


def save_predictions(records: Sequence[Record], path: Path, format: str) -> None:
    """Write predictions in one of `FORMATS`.

    Raises:
        UsageError: The file can't be written.
    """
    if format == 'parquet':
        import pyarrow as pa

        _write_parquet(pa.Table.from_pylist(records), path)
        return
    with written_whole(path) as unfinished:
        unfinished.write_text(predictions_text(records, format) + '\n', encoding='utf-8')


def save_embeddings(records: Sequence[Record], path: Path, format: str) -> None:
    """Write features in one of `EMBEDDING_FORMATS`: arrays as `numpy.load` reads them, N × channels, or a table.

    Raises:
        UsageError: The file can't be written.
    """
    names = [record['filename'] for record in records]
    embeddings = np.stack([record['embedding'] for record in records])
    if format == 'npz':
        save_arrays({'filename': np.array(names), 'embedding': embeddings}, path)
        return
    import pyarrow as pa

    vectors = pa.FixedSizeListArray.from_arrays(pa.array(embeddings.ravel()), embeddings.shape[1])
    _write_parquet(pa.table({'filename': names, 'embedding': vectors}), path)


def _write_parquet(table, path: Path) -> None:
    import pyarrow.parquet

    with written_whole(path) as unfinished:
        pyarrow.parquet.write_table(table, unfinished)
