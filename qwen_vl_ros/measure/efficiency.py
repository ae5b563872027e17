"""
Efficiencies of this engine's own kernels, from the files of benchmark records.

Encoder and prefill are a share of a large matrix product of the same run, decoding of the memory's
bandwidth. A large product does not reach an Orin's peak rate either, so that the first two are
multiplied with what one was published to reach there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_vl_ros.measure.projection import Key
from qwen_vl_ros.measure.roofline import FORMATS

#: A large FP16 product on an AGX Orin, share of 42.6 TFLOP/s: 33.4 to 34.1 were measured
#: (infinigence/ApxInf, pull request 74); the least of them.
ORIN_PRODUCT = 33.4 / 42.6

#: Stage of a record to the name of the efficiency.
STAGES = {'encoder': 'encode', 'prefill': 'prefill', 'decode': 'token'}

#: Types of weights as records name them, to the kinds of :data:`FORMATS`.
KINDS = {'bf16': 'fp16', 'fp16': 'fp16', 'bfloat16': 'fp16', 'float16': 'fp16', 'int8': 'w8',
         'w8': 'w8', 'int4': 'w4', 'w4': 'w4', 'awq': 'w4', 'gptq': 'w4'}

#: Variant of a record of decoding by kernels that an Orin runs, where others are faster.
PORTABLE = 'kernels that an Orin runs'

#: What is taken where a stage was timed in several cases.
SIZE, SHAPE = '640x480', '2b'


@dataclass(frozen=True)
class Own:
    """
    One efficiency.

    :param share: of the peak rate, or of the bandwidth, as a projection takes it.
    :param measured: share as the record has it.
    :param source: the record: machine, case.
    """

    share: float
    measured: float
    source: str


def own_efficiencies(records: Iterable[Mapping[str, Any]]) -> dict[Key, Own]:
    """
    Return an efficiency for each stage and kind of weights that was measured on a GPU.

    Of several records of one key the one of :data:`SHAPE`, :data:`PORTABLE`, all tokens and
    :data:`SIZE` counts, and of those the best.
    """
    found: dict[Key, tuple[tuple[Any, ...], Own]] = {}
    for record in records:
        case = record['case']
        name = STAGES.get(record['stage'])
        kind = KINDS.get(str(case.get('dtype', '')))
        if (name is None or kind is None or record['metric'] != 'share_of_limit'
                or record['kind'] != 'measured' or case.get('path') != 'cuda'
                or case.get('sequences', 1) != 1 or not 0 < record['value'] <= 1):
            continue
        value = float(record['value'])
        share = value if name == 'token' else value * ORIN_PRODUCT
        words = ' '.join(f'{k} {v}' for k, v in case.items() if k != 'path')
        rank = (case.get('model') == SHAPE, case.get('variant') == PORTABLE,
                case.get('keep', 1.0) == 1.0, case.get('size') == SIZE, value)
        own = Own(share, value, f"{record['stage']} {words} on {record['machine'].split(',')[0]}")
        if (name, kind) not in found or rank > found[name, kind][0]:
            found[name, kind] = (rank, own)
    return {key: own for key, (_, own) in found.items()}


def load_efficiencies(folder: Path) -> dict[Key, Own]:
    """Return :func:`own_efficiencies` of all files of records in a folder."""
    from qwen_vl_ros.measure.bench import kept_files, load_records

    return own_efficiencies(
        record for path in kept_files(folder) for record in load_records(path))


def for_format(own: Mapping[Key, Own], name: str) -> dict[str, Own] | None:
    """
    Return the three efficiencies of a weight format by stage, or ``None`` where one is missing.

    Prefill with weights of 4 or 8 bits takes that of 16 where it was not timed itself.

    :param name: a key of :data:`~qwen_vl_ros.measure.roofline.FORMATS`.
    """
    kind = FORMATS[name].kind
    wanted = {'encode': own.get(('encode', 'fp16')),
              'prefill': own.get(('prefill', kind), own.get(('prefill', 'fp16'))),
              'token': own.get(('token', kind))}
    return {k: v for k, v in wanted.items() if v} if all(wanted.values()) else None
