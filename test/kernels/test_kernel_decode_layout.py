"""How the decode step is shared out, and that both sides of its C interface mean the same."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from qwen_vl_ros.engine.layers import Linear
from qwen_vl_ros.engine.quant_linear import Int4Linear
from qwen_vl_ros.kernels import decode
from qwen_vl_ros.kernels import decode_gemm as gemm
from qwen_vl_ros.kernels import decode_layout as layout

INCLUDE = Path(__file__).resolve().parents[2] / 'kernels' / 'include'
SHAPES = {
    '2b': layout.Shape(1536, 8960, 12, 2, 128, 151936),
    '7b': layout.Shape(3584, 18944, 28, 4, 128, 152064),
    'tiny': layout.Shape(256, 448, 4, 2, 64, 512),
    '2b int8': layout.Shape(1536, 8960, 12, 2, 128, 151936, layout.INT8, layout.INT8),
    '2b int4': layout.Shape(1536, 8960, 12, 2, 128, 151936, layout.INT4, layout.INT8),
    'tiny int4': layout.Shape(256, 448, 4, 2, 64, 512, layout.INT4, layout.INT8),
}


@pytest.mark.parametrize('blocks', [132, 16, 7])
@pytest.mark.parametrize('name', SHAPES)
def test_every_item_has_one_reader(name, blocks):
    shape = SHAPES[name]
    plan = layout.plan(shape, blocks)
    for index, op in enumerate(layout.OPS):
        begin, end, per = plan.ranges[index, :, :3].T
        assert begin[0] == 0 and end[-1] == shape.tiles(op) * shape.per_tile(op)
        assert (begin[1:] == end[:-1]).all() and (begin <= end).all()
        assert (per == shape.per_tile(op)).all()
        if op != 'down':
            assert (begin % per == 0).all()


@pytest.mark.parametrize('name', SHAPES)
def test_parts_of_a_sum_do_not_meet(name):
    shape = SHAPES[name]
    plan = layout.plan(shape, 132)
    written = set()
    for begin, end, per, first, base, *_ in plan.ranges[layout.OPS.index('down')].tolist():
        for tile in range(begin // per, -(-end // per)) if begin < end else ():
            part = first if tile == begin // per else base
            assert part < plan.parts_down
            assert (tile, part) not in written
            written.add((tile, part))
    assert {tile for tile, _ in written} == set(range(shape.tiles('down')))


@pytest.mark.parametrize('name', ['2b', '7b', '2b int8', '2b int4'])
def test_blocks_read_the_same_number_of_bytes(name):
    ranges = layout.plan(SHAPES[name], 132).ranges[:4]
    items = (ranges[:, :, 1] - ranges[:, :, 0]).sum(0)
    assert items.max() - items.min() <= 2


@pytest.mark.parametrize('op', layout.OPS)
def test_tiles_hold_every_row_once(op):
    shape = SHAPES['tiny']
    rows = layout.tile_rows(shape, op)
    assert sorted(rows.flatten().tolist()) == list(range(shape.outputs(op)))
    apart = {'qkv': shape.head_dim // 2, 'gate_up': shape.mlp}.get(op, 8)
    assert (rows[:, 8:] - rows[:, :8] == apart).all()


def test_scales_follow_the_tiles():
    shape = layout.Shape(256, 64, 4, 2, 64, 512, layout.INT4, layout.INT8)
    matrix = Int4Linear.of(Linear(torch.randn(shape.outputs('gate_up'), 256)))
    rows = layout.tile_rows(shape, 'gate_up')
    ordered = layout.group_scales(matrix.scales, matrix.zeros, rows, 256, 64)
    assert layout.group_of(matrix.scales, 256) == 128
    tiles, groups = shape.tiles('gate_up'), 4
    assert len(ordered) >= tiles * groups
    for tile, group, place in ((0, 0, 3), (5, 2, 8), (tiles - 1, 3, 15)):
        row = rows[tile, place]
        scale, zero = ordered[tile * groups + group, place].tolist()
        assert scale == matrix.scales[row, group // 2] and zero == matrix.zeros[row, group // 2]
    scales = torch.rand(shape.outputs('gate_up'))
    assert layout.channel_scales(scales, rows)[5, 8] == scales[rows[5, 8]]


def test_groups_that_no_kernel_reads_are_named():
    for groups, found in ((16, 16), (5, 51)):
        with pytest.raises(ValueError, match=f'groups of {found} inputs'):
            layout.group_of(torch.ones(4, groups), 256)
    assert layout.group_of(torch.ones(4, 1), 512) == 128


@pytest.mark.skipif(not shutil.which('g++'), reason='no C++ compiler')
def test_structures_are_those_of_the_header(tmp_path):
    natives = {
        'matrix': decode.NativeMatrix, 'layer': decode.NativeLayer, 'model': decode.NativeModel,
        'row': decode.NativeRow, 'launch': decode.NativeLaunch}
    lines, expected = [], []
    for name, native in [(f'qwen_vl_decode_{k}', v) for k, v in natives.items()] + [
            ('qwen_vl_quant_product', gemm.NativeProduct)]:
        lines.append(f'sizeof({name})')
        expected.append(ctypes.sizeof(native))
        for field in native._fields_:
            lines.append(f'offsetof({name}, {field[0]})')
            expected.append(getattr(native, field[0]).offset)
    for field in decode.RESULT.names:
        lines.append(f'offsetof(qwen_vl_decode_result, {field})')
        expected.append(decode.RESULT.fields[field][1])
    lines += ['sizeof(qwen_vl_decode_result)', 'QWEN_VL_DECODE_ROWS', 'QWEN_VL_DECODE_RESULTS',
              'sizeof(qwen_vl_decode_range)', 'QWEN_VL_OPS', 'QWEN_VL_FORM_INT8',
              'QWEN_VL_FORM_INT4', 'QWEN_VL_FORM_INT8_GROUP', 'QWEN_VL_RESULT_STUCK']
    expected += [decode.RESULT.itemsize, decode.ROWS, decode.RESULTS, 8 * 4, len(layout.OPS),
                 layout.INT8, layout.INT4, layout.INT8_GROUP, decode.STUCK]
    source = tmp_path / 'sizes.cc'
    source.write_text('#include "qwen_vl_decode.h"\n#include <cstdio>\nint main() {\n' + ''.join(
        f'  std::printf("%zu\\n", (size_t)({line}));\n' for line in lines) + '}\n')
    program = tmp_path / 'sizes'
    subprocess.run(['g++', '-I', str(INCLUDE), str(source), '-o', str(program)], check=True)
    out = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert dict(zip(lines, map(int, out.split()))) == dict(zip(lines, expected))


def test_unknown_sizes_are_refused_by_shape():
    shape = SHAPES['2b']
    assert shape.per_tile('qkv') == 24 and shape.per_tile('down') == 140
    assert SHAPES['tiny int4'].per_tile('down') == 2  # 224 bytes
    assert np.array_equal(layout.tile_rows(shape, 'out')[3], np.arange(48, 64))
