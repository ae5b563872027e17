"""The table behind the headline: answers a second of Qwen2-VL-2B on an AGX Orin, projected."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from qwen_vl_ros.measure.devices import Mode, find_device
from qwen_vl_ros.measure.efficiency import ORIN_PRODUCT, Own, for_format
from qwen_vl_ros.measure.projection import (
    ASSUMPTIONS,
    Key,
    NotValidatedError,
    Projected,
    project,
    total_ms,
    validated,
)
from qwen_vl_ros.measure.record import record
from qwen_vl_ros.measure.roofline import SHAPES, Case, decode_limit, limit, stages

MODES = ('15w', '30w', '50w', 'maxn')
FORMATS = ('fp16', 'w8', 'w4-head8')
SIZES = ((448, 448), (640, 480), (1280, 720))
KEEPS = (1.0, 0.5, 0.33)
ANSWERS = (1, 8, 33)


#: Whose kernels a row is about.
PUBLISHED, OURS = 'published stacks', 'this engine'


def headline(device_name: str = 'orin-agx-64', modes: Sequence[str] = MODES,
             own: Mapping[Key, Own] | None = None) -> Iterator[dict[str, Any]]:
    """
    Yield one row for each picture size, keep ratio, weight format, answer length and mode.

    A row has ``size``, ``keep``, ``format``, ``answer``, ``mode``, ``answers_per_s`` (projected)
    and ``limit_answers_per_s`` (computed: every stage at its roof).

    :param own: measured efficiencies instead of the published ones; formats that lack one are
        left out.
    """
    for size, keep, name, answer, mode_name in product(SIZES, KEEPS, FORMATS, ANSWERS, modes):
        shares = None
        if own is not None:
            found = for_format(own, name)
            if found is None:
                continue
            shares = {stage: one.share for stage, one in found.items()}
        device, mode_name, mode = find_device(device_name, mode_name)
        case = Case(SHAPES['2b'], name, size, keep, answer)
        parts = project(case, device, mode, shares)
        roof = sum(p.limit.ms * p.count for p in parts if not p.part_of)
        yield {'size': f'{size[0]}x{size[1]}', 'keep': keep, 'format': name, 'answer': answer,
               'mode': mode_name, 'answers_per_s': 1e3 / total_ms(parts),
               'limit_answers_per_s': 1e3 / roof}


def headline_records(device_name: str = 'orin-agx-64', modes: Sequence[str] = MODES,
                     own: Mapping[Key, Own] | None = None) -> list[dict[str, Any]]:
    """
    Return the table as records of kind ``projected``, with the assumptions.

    :param own: efficiencies of this engine's kernels: the same rows once more, from them.
    """
    _, checks = validated()
    spread = {f'{stage} {kind}': round(check.spread, 3) for (stage, kind), check in checks.items()
              if check.good}
    template = record('roofline', {}, 'answers_per_s', 0.0, '1/s', runs=0, kind='projected')
    template['machine'] = f'{find_device(device_name, None)[0].title}, projected: none was at hand'
    template['command'] = f'qwen_vl roofline --table --device {device_name} --json FILE'
    published = {'assumptions': list(ASSUMPTIONS), 'deviation_of_published_figures': spread}
    kinds: list[tuple[str, Mapping[Key, Own] | None, dict[str, Any]]] = [
        (PUBLISHED, None, published)]
    if own:
        kinds.append((OURS, own, {'assumptions': own_assumptions(own)}))
    # One record is made and copied: git and the machine are asked only once.
    return [template | about | {
        'case': {'model': '2b', 'device': device_name, 'kernels': whose, 'mode': row['mode'],
                 'dtype': row['format'], 'size': row['size'], 'keep': row['keep'],
                 'answer_tokens': row['answer']},
        'value': round(row['answers_per_s'], 3), 'limit': round(row['limit_answers_per_s'], 3)}
        for whose, shares, about in kinds for row in headline(device_name, modes, shares)]


def own_assumptions(own: Mapping[Key, Own]) -> list[str]:
    """Return what a projection from measured efficiencies takes for granted."""
    return [
        ASSUMPTIONS[0],
        *(f'{stage} with {kind} weights at {one.share:.1%}: '
          + ('' if stage == 'token' else f'{ORIN_PRODUCT:.0%}, a large product on an Orin '
             '(published), x ') + f'{one.measured:.1%}, {one.source}'
          for (stage, kind), one in sorted(own.items())),
        'kernels reach the same share of an Orin\'s roofs as of the machine they were timed on; '
        'products there may be a library\'s, which has other code for an Orin; an H200 asks more '
        'bytes of a multiprocessor in a clock (18) than an Orin does (10): decoding is a low '
        'estimate',
        *ASSUMPTIONS[2:]]


def format_headline(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table as Markdown: one line a case, one column a power mode."""
    modes = list(dict.fromkeys(row['mode'] for row in rows))
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in rows:
        key = (row['size'], row['keep'], row['format'], row['answer'])
        cells.setdefault(key, {})[row['mode']] = row['answers_per_s']
    lines = ['| picture | kept | weights | answer | ' + ' | '.join(m.upper() for m in modes)
             + ' |', '|---|---|---|---|' + '---|' * len(modes)]
    for (size, keep, name, answer), values in cells.items():
        words = f'{answer} token{"s"[answer == 1:]}'
        lines.append(f'| {size} | {keep:.0%} | {name} | {words} | '
                     + ' | '.join(f'{values[m]:.2f}' for m in modes) + ' |')
    return '\n'.join(lines)


def summary(case: Case, device_name: str, mode_name: str | None,
            own: Mapping[str, float] | None = None) -> dict[str, Any]:
    """
    Return picture, limits and, where they are valid, projections of one case, JSON-ready.

    :param own: efficiencies that were given, see :func:`project`.
    :raises ValueError: for a device or mode that is not in the table.
    """
    device, mode_name, mode = find_device(device_name, mode_name)
    try:
        projected: list[Projected] | None = project(case, device, mode, own)
        refusal = ''
    except NotValidatedError as error:
        projected, refusal = None, str(error)
    out = describe(case, mode, device.launch_us, projected)
    out |= {'device': device_name, 'title': device.title, 'mode': mode_name,
            'source': device.source}
    if projected is None:
        out['projection_refused'] = refusal
    else:
        _, checks = validated()
        out['projection'] |= {
            'assumptions': list(ASSUMPTIONS) + [
                f'efficiency of {name} given by hand: {value:.0%}'
                for name, value in (own or {}).items()],
            'deviation_of_published_figures': {
                f'{stage} {kind}': round(check.spread, 3)
                for (stage, kind), check in checks.items() if check.good}}
    return out


def describe(case: Case, mode: Mode, launch_us: float,
             projected: Sequence[Projected] | None) -> dict[str, Any]:
    """Return the figures of a case on a mode of any device, JSON-ready."""
    rows: list[dict[str, Any]] = []
    roofs = 0.0
    for stage in stages(case):
        roof = limit(stage, mode, launch_us)
        roofs += 0.0 if stage.part_of else roof.ms * stage.count
        rows.append({
            'stage': stage.name, 'count': stage.count, 'part_of': stage.part_of,
            'flops': stage.flops, 'bytes_read': stage.bytes_read,
            'bytes_written': stage.bytes_written, 'flops_per_byte': round(stage.density, 3),
            'kernels': stage.kernels, 'limit_ms': roof.ms, 'bound': roof.bound,
            'compute_ms': roof.compute, 'memory_ms': roof.memory, 'launch_ms': roof.launches})
    out: dict[str, Any] = {
        'kind': 'computed', 'model': case.shape.name, 'format': case.format,
        'size': f'{case.size[0]}x{case.size[1]}',
        'resized': 'x'.join(str(n * (case.patch or case.shape.vision.patch))
                            for n in reversed(case.grid)),
        'grid': list(case.grid), 'patches': case.patches, 'tokens': case.tokens,
        'kept_tokens': case.kept, 'keep': case.keep, 'prompt_tokens': case.kept + case.text,
        'answer_tokens': case.answer, 'gb_s': mode.gb_s, 'tflops': mode.tflops,
        'ridge_flops_per_byte': round(mode.tflops * 1e3 / mode.gb_s, 1),
        'launch_us': launch_us, 'token_weight_bytes': case.token_bytes,
        'encoder_tflop': next(r['flops'] for r in rows if r['stage'] == 'encode') / 1e12,
        'decode_limit_tokens_per_s': round(decode_limit(case, mode), 1),
        'limit_ms': roofs, 'limit_answers_per_s': 1e3 / roofs, 'stages': rows}
    if projected is not None:
        spent = {p.name: p.ms for p in projected}
        whole = total_ms(projected)
        # An object of its own: nothing beside a limit, which is computed, is a projection.
        out['projection'] = {
            'kind': 'projected', 'assumptions': list(ASSUMPTIONS), 'answer_ms': whole,
            'answers_per_s': 1e3 / whole, 'decode_tokens_per_s': 1e3 / spent['token'],
            'stages_ms': spent}
    return out

