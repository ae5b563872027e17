"""Figures of llama.cpp that somebody measured on the same machine, from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.records import CannotRun, Record, record

#: What llama.cpp calls the weights that ours are held against.
NAMES = {'bf16': 'bf16', 'int8': 'q8_0', 'int4': 'q4_0'}


def beside(path: Path, case: dict[str, Any], tokens_per_s: float) -> list[Record]:
    """
    Return a record of tokens/s with llama.cpp as its baseline.

    :param path: JSON object with ``what`` (version and command), ``model`` (2b where it is left
        out) and ``tokens_per_s``: ``{"bf16": {"decode": 440.5}, "q8_0": ..., "q4_0": ...}``.
    :raises CannotRun: for a file that cannot be read.
    """
    try:
        figures = json.loads(path.read_text())
        value = figures['tokens_per_s'].get(NAMES.get(case['dtype'], ''), {}).get('decode')
        other = figures.get('model', '2b') != case['model']
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise CannotRun(f'{path}: {error}') from error
    if value is None or other:
        return []
    return [record('decode', case, 'tokens_per_s', tokens_per_s, '1/s', higher_is_better=True,
                   baseline=('llama.cpp', float(value)),
                   note=f"measured apart: {figures.get('what', 'version unknown')}")]
