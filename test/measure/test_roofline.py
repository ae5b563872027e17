"""Costs, limits and projections: against worked figures, and against what others published."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from qwen_vl_ros.cli.main import main
from qwen_vl_ros.engine import costs
from qwen_vl_ros.measure import efficiency, headline, peers, projection
from qwen_vl_ros.measure.devices import DEVICES, find_device
from qwen_vl_ros.measure.roofline import (
    SHAPES,
    Case,
    decode_limit,
    find_shape,
    limit,
    patch_table,
    stages,
)

TINY = Path(__file__).parents[2] / 'models' / 'tiny'


def by_name(case):
    return {stage.name: stage for stage in stages(case)}


def test_patches_and_tokens_of_usual_cameras():
    two = SHAPES['2b']
    vga, hd = Case(two), Case(two, size=(1280, 720))
    assert (vga.grid, vga.patches, vga.tokens) == ((34, 46), 1564, 391)
    assert (hd.grid, hd.patches, hd.tokens) == ((52, 92), 4784, 1196)
    assert Case(two, size=(1920, 1080), max_pixels=1003520).patches == 4888
    assert Case(two, size=(1920, 1080), max_pixels=12845056).patches == 10764
    assert Case(two, size=(512, 512), patch=16).patches == 1024
    assert {(224, 16): 196, (1024, 16): 4096}.items() <= {
        (side, patch): n for side, patch, n in patch_table()}.items()


@pytest.mark.parametrize(('size', 'most', 'tflop'), [
    ((588, 336), 1003520, 1.44), ((640, 480), 1003520, 2.40), ((1280, 720), 1003520, 9.77),
    ((1920, 1080), 1003520, 10.1), ((1920, 1080), 12845056, 32.5)])
def test_encoder_flops(size, most, tflop):
    found = by_name(Case(SHAPES['2b'], size=size, max_pixels=most))['encode'].flops / 1e12
    # The worked figures of the larger pictures leave out the merger, about 1 %.
    assert found == pytest.approx(tflop, rel=0.02)


@pytest.mark.parametrize(('model', 'name', 'gigabytes', 'rate'), [
    ('2b', 'fp16', 3.087, 66.3), ('2b', 'w8', 1.544, 132.6), ('2b', 'w4', 1.148, 178.4),
    ('2b', 'w4-head8', 0.914, 224), ('2b', 'w4-all', 0.802, 255), ('7b', 'fp16', 14.14, 14.5),
    ('7b', 'w8', 7.07, 29.0), ('7b', 'w4', 4.48, 45.7), ('7b', 'w4-head8', 3.94, 52.0)])
def test_bytes_of_a_token_and_decode_limit(model, name, gigabytes, rate):
    case = Case(SHAPES[model], name)
    assert case.token_bytes / 1e9 == pytest.approx(gigabytes, rel=2e-3)
    _, _, mode = find_device('orin-agx-64', 'maxn')
    assert decode_limit(case, mode) == pytest.approx(rate, rel=2e-3)


def test_weights_counted_here_are_those_of_a_checkpoint():
    from safetensors import safe_open

    shape = find_shape(str(TINY))
    with safe_open(TINY / 'model.safetensors', 'numpy') as file:
        sizes = {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    vision = sum(n for name, n in sizes.items() if 'visual' in name)
    layers = sum(n for name, n in sizes.items()
                 if 'visual' not in name and 'embed' not in name and 'lm_head' not in name)
    assert costs.vision_weights(shape.vision, 1176) == vision
    assert costs.language_weights(shape.language)[0] == layers
    assert find_shape('tiny').vision == shape.vision
    assert find_shape('tiny').language == replace(shape.language)


def test_keep_ratio_and_answer_length_reach_every_stage_that_they_change():
    whole, half = by_name(Case(SHAPES['2b'])), by_name(Case(SHAPES['2b'], keep=0.5))
    assert half['patches'] == whole['patches'] and half['upload'] == whole['upload']
    assert half['encode'].flops < 0.5 * whole['encode'].flops  # attention is quadratic
    assert half['projection'].flops == pytest.approx(0.5 * whole['projection'].flops, rel=0.01)
    assert half['prefill'].flops < 0.6 * whole['prefill'].flops
    assert by_name(Case(SHAPES['2b'], answer=1))['token'].count == 0
    assert whole['token'].count == 32


def test_folding_halves_the_projection():
    folded = by_name(Case(SHAPES['2b']))['projection']
    plain = by_name(Case(SHAPES['2b'], fold=False))['projection']
    assert plain.flops == 2 * folded.flops
    # With uint8 inputs its density lies above the ridge of an Orin: arithmetic bounds it.
    device, _, mode = find_device('orin-agx-64', None)
    assert limit(folded, mode, device.launch_us).bound == 'compute'


def test_bounds_name_each_of_the_three_roofs():
    device, _, mode = find_device('orin-agx-64', 'maxn')
    found = {s.name: limit(s, mode, device.launch_us).bound for s in stages(Case(SHAPES['2b']))}
    assert found['encode'] == 'compute' and found['token'] == 'memory'
    h200, _, fast = find_device('h200', None)
    tiny = by_name(Case(SHAPES['tiny']))
    assert limit(tiny['token'], fast, h200.launch_us).bound == 'launches'


def test_orin_modes_multiply_out():
    modes = DEVICES['orin-agx-64'].modes
    assert [round(modes[m].tflops, 1) for m in ('15w', '30w', '50w', 'maxn')] == [
        5.0, 10.0, 26.7, 42.6]
    assert modes['30w'].gb_s == modes['maxn'].gb_s == 204.8
    assert round(DEVICES['orin-agx-32'].modes['maxn'].tflops, 1) == 26.7


# The projection against what others published.

KINDS = [('encode', 'fp16'), ('prefill', 'fp16'), ('prefill', 'w4'), ('token', 'fp16'),
         ('token', 'w8'), ('token', 'w4')]


@pytest.mark.parametrize('key', KINDS, ids=' '.join)
def test_half_of_the_published_figures_predicts_the_other_half(key):
    _, checks = projection.validated()
    check = checks[key]
    assert check.held >= 1 and check.fitted >= 1
    assert check.worst <= projection.TOLERANCE == 0.15, check.misses
    assert check.good


@pytest.mark.parametrize('peer', projection.halves()[1], ids=lambda p: f'{p.stage}-{p.name}')
def test_each_held_figure(peer):
    fit, checks = projection.validated()
    if checks[projection.key_of(peer)].good:
        assert abs(projection.deviation(peer, fit)) <= 0.15
    else:
        assert peer.weight_format == 'gguf'


def test_the_halves_are_halves_and_disjoint():
    first, second = projection.halves()
    assert not set(first) & set(second)
    assert len(first) + len(second) == sum(not p.excluded for p in peers.PEERS)
    for key in KINDS:
        counts = [sum(projection.key_of(p) == key for p in half) for half in (first, second)]
        assert abs(counts[0] - counts[1]) <= 1


def test_only_figures_that_contradict_themselves_are_excluded():
    out = {p.source for p in peers.PEERS if p.excluded}
    assert out == {'TinyChat, NVILA-2B', 'FlashRT, slow end', 'FlashRT, fast end'}
    # The reason given for NVILA-2B, worked out again.
    slow, quick = (next(p for p in peers.PEERS if 'NVILA-2B' in p.source and p.weight_format == w)
                   for w in ('fp16', 'w4'))
    saved = (peers.DECODERS[slow.decoder].token_bytes('fp16', 300)
             - peers.DECODERS[quick.decoder].token_bytes('w4', 300))
    assert saved / (slow.ms - quick.ms) / 1e6 > 4 * 204.8


def test_a_format_that_fails_its_figures_is_refused(monkeypatch):
    _, checks = projection.validated()
    assert not checks['token', 'gguf'].good and checks['token', 'gguf'].misses
    device, _, mode = find_device('orin-agx-64', None)
    case = Case(SHAPES['2b'], 'w4')
    projection.project(case, device, mode)
    broken = dict(checks) | {('token', 'w4'): replace(
        checks['token', 'w4'], misses=('some peer',))}
    monkeypatch.setattr(projection, 'validated', lambda: (projection.fit_peers(
        projection.halves()[0]), broken))
    with pytest.raises(projection.NotValidatedError, match='some peer'):
        projection.project(case, device, mode)


def test_other_devices_and_formats_get_limits_only():
    for name in ('h200', 'thor-t5000', 'a100-80'):
        device, _, mode = find_device(name, None)
        with pytest.raises(projection.NotValidatedError, match='limits only'):
            projection.project(Case(SHAPES['2b']), device, mode)
    device, _, mode = find_device('orin-nx-16', None)
    with pytest.raises(projection.NotValidatedError, match='32-bit'):
        projection.project(Case(SHAPES['2b'], 'fp32'), device, mode)


def test_efficiencies_measured_elsewhere_take_the_place_of_published_ones():
    case, own = Case(SHAPES['2b']), {'encode': 0.6, 'prefill': 0.6, 'token': 0.78}
    device, _, mode = find_device('h200', None)
    parts = {p.name: p for p in projection.project(case, device, mode, own)}
    assert parts['token'].ms == pytest.approx(parts['token'].limit.memory / 0.78)
    assert parts['encode'].ms == pytest.approx(parts['encode'].limit.compute / 0.6)
    with pytest.raises(projection.NotValidatedError, match='lacks encode and prefill'):
        projection.project(case, device, mode, {'token': 0.78})
    orin, _, mode = find_device('orin-agx-64', None)
    mixed = {p.name: p.ms for p in projection.project(case, orin, mode, {'encode': 0.9})}
    plain = {p.name: p.ms for p in projection.project(case, orin, mode)}
    assert mixed['encode'] < plain['encode'] and mixed['token'] == plain['token']


def test_projected_times_never_beat_the_limits():
    for name, device in DEVICES.items():
        for mode in device.modes.values():
            if device.orin:
                for part in projection.project(Case(SHAPES['2b'], 'w4-head8'), device, mode):
                    assert part.ms >= part.limit.ms * 0.999, (name, part)


def test_less_work_and_more_power_give_more_answers():
    rows = list(headline.headline())
    value = {(r['size'], r['keep'], r['format'], r['answer'], r['mode']): r['answers_per_s']
             for r in rows}
    assert len(value) == len(rows) == 3 * 3 * 3 * 3 * 4
    base = ('640x480', 1.0, 'fp16', 33, 'maxn')
    for i, better in ((0, '448x448'), (1, 0.5), (2, 'w8'), (3, 8)):
        assert value[(*base[:i], better, *base[i + 1:])] > value[base]
    assert value[(*base[:4], '30w')] < value[base]
    for row in rows:
        assert row['answers_per_s'] < row['limit_answers_per_s']


def test_the_headline_records_say_that_they_are_projected():
    records = headline.headline_records()
    assert {r['kind'] for r in records} == {'projected'}
    assert all(r['assumptions'] and r['deviation_of_published_figures'] for r in records)


def share(stage, value, **case):
    return {'stage': stage, 'metric': 'share_of_limit', 'value': value, 'kind': 'measured',
            'machine': 'NVIDIA H200, driver 1', 'case': {'path': 'cuda', 'model': '2b', **case}}


def test_own_efficiencies_come_from_records():
    records = [
        share('encoder', 0.7, dtype='bf16', size='1280x720'),
        share('encoder', 0.6, dtype='bf16', size='640x480'),
        share('encoder', 0.9, dtype='bf16', size='640x480', keep=0.5),
        share('encoder', 0.5, dtype='bf16', size='640x480') | {'kind': 'projected'},
        share('prefill', 0.5, dtype='bf16', size='640x480'),
        share('decode', 0.8, dtype='bf16'), share('decode', 0.9, dtype='bf16', sequences=4),
        share('decode', 0.7, dtype='int8'), share('decode', 1.7, dtype='int4'),
        share('decode', 0.6, dtype='int8', variant=efficiency.PORTABLE),
        share('decode', 0.9, dtype='bf16') | {'case': {'path': 'cpu', 'dtype': 'bf16'}}]
    own = efficiency.own_efficiencies(records)
    assert {key: one.measured for key, one in own.items()} == {
        ('encode', 'fp16'): 0.6, ('prefill', 'fp16'): 0.5, ('token', 'fp16'): 0.8,
        ('token', 'w8'): 0.6}
    assert own['encode', 'fp16'].share == pytest.approx(0.6 * 33.4 / 42.6)
    assert own['token', 'fp16'].share == 0.8
    assert efficiency.for_format(own, 'w4') is None  # its decoding was not timed
    rows = list(headline.headline(own=own))
    assert {r['format'] for r in rows} == {'fp16', 'w8'}
    assert all(0 < r['answers_per_s'] < r['limit_answers_per_s'] for r in rows)
    both = headline.headline_records(own=own)
    ours = [r for r in both if r['case']['kernels'] == headline.OURS]
    assert {r['kind'] for r in both} == {'projected'} and 0 < len(ours) < len(both)
    words = ' '.join(ours[0]['assumptions'])
    assert 'projected, not measured' in words and '60.0%, encoder' in words and 'H200' in words
    assert efficiency.own_efficiencies([]) == {}
    assert len(headline.headline_records(own={})) == len(both) - len(ours)


# The command.

def run(capsys, *words):
    code = main(['roofline', *words])
    return code, capsys.readouterr()


def test_command_gives_the_known_figures(capsys):
    code, out = run(capsys, '--device', 'orin-agx-64', '--mode', 'maxn', '--size', '640x480',
                    '--json', '-')
    found = json.loads(out.out)
    assert code == 0
    assert (found['patches'], found['tokens']) == (1564, 391)
    assert round(found['encoder_tflop'], 2) == 2.40
    assert found['decode_limit_tokens_per_s'] == 66.3 and found['format'] == 'fp16'
    projection = found['projection']
    assert projection['kind'] == 'projected' and projection['assumptions']
    # What is computed and what is projected stand in objects of their own.
    assert found['kind'] == 'computed'
    assert not [k for row in (found, *found['stages']) for k in row if 'projected' in k]
    limits = {row['stage']: row['limit_ms'] for row in found['stages']}
    assert projection['stages_ms'].keys() == limits.keys()
    assert all(projection['stages_ms'][name] >= limits[name] * 0.999 for name in (
        'encode', 'prefill', 'token'))


def test_command_for_people(capsys):
    code, out = run(capsys, '--mode', '30w', '--dtype', 'w4-head8', '--keep', '0.5')
    assert code == 0 and 'projected' in out.out and 'assumes:' in out.out
    code, out = run(capsys, '--device', 'h200', '--model', str(TINY / 'config.json'))
    assert code == 0 and 'not projected' in out.out and 'launches' in out.out
    code, out = run(capsys, '--device', 'h200', '--efficiency', 'encode=.6', 'prefill=.6',
                    'token=.78')
    assert code == 0 and 'efficiency of token given by hand: 78%' in out.out
    code, out = run(capsys, '--peers')
    assert code == 0 and 'REFUSED' in out.out and 'not comparable' in out.out
    code, out = run(capsys, '--devices')
    assert code == 0 and '8 SMs at 612 MHz' in out.out
    code, out = run(capsys, '--table')
    assert code == 0 and '| 640x480 | 100% | fp16 | 33 tokens |' in out.out


@pytest.mark.parametrize(('words', 'named'), [
    (['--device', 'toaster'], 'orin-agx-64'), (['--mode', '500w'], '15w'),
    (['--size', '640'], 'WxH'), (['--size', '1x65000'], 'narrow'), (['--keep', '0'], '--keep'),
    (['--dtype', 'int3'], 'w4-head8'), (['--model', 'nowhere'], '2b'), (['--patch', '0'], '1 to'),
    (['--answer', '0'], '--answer'), (['--table', '--device', 'h200'], 'Orin'),
    (['--efficiency', 'token=2'], 'share'), (['--efficiency', 'x=1'], 'encode'),
    (['--max-pixels', '10'], '2x2'), (['--json', '/nowhere/x.json'], '/nowhere/x.json'),
    (['--table', '--results', '/nowhere'], '/nowhere is no folder'),
    (['--sweep', '/proc/x'], 'cannot write into /proc/x'),
    (['--sweep', '/dev/null/x'], 'cannot write into'),
    (['--peers', '--json', '/nowhere/x.json'], 'cannot write')])
def test_command_refuses_with_one_sentence(capsys, words, named):
    code, out = run(capsys, *words)
    assert code == 2 and named in out.err and not out.out
    assert len(out.err.splitlines()) == 1


def test_efficiencies_that_are_missing_are_named(capsys):
    code, out = run(capsys, '--device', 'h200', '--efficiency', 'encode=0.5')
    assert code == 0 and '--efficiency lacks prefill and token' in out.out
    assert 'limits only' not in out.out
    assert 'limits only' in run(capsys, '--device', 'h200')[1].out


def test_the_table_once_more_from_records(capsys, tmp_path):
    code, out = run(capsys, '--table', '--results', str(tmp_path))
    assert code == 0 and 'no records in' in out.out and 'own kernels' not in out.out
    origin = {'unit': '', 'commit': 'abc', 'command': 'x'}
    records = [share('encoder', 0.6, dtype='bf16', size='640x480') | origin,
               share('prefill', 0.5, dtype='bf16', size='640x480') | origin,
               share('decode', 0.8, dtype='bf16') | origin]
    (tmp_path / 'card.json').write_text(json.dumps(records))
    code, out = run(capsys, '--table', '--results', str(tmp_path))
    assert code == 0 and "projected, from this engine's own kernels" in out.out
    assert '60.0%, encoder' in out.out
    (tmp_path / 'card.json').write_text('{')
    code, out = run(capsys, '--table', '--results', str(tmp_path))
    assert code != 0 and 'card.json' in out.err
