"""Link state from a stand-in of NVML, copies between CPU buffers, and the arithmetic behind."""

import json
import math
import random
from types import SimpleNamespace

import pytest

from qwen_vl_ros.cli.interconnect import format_links, format_result
from qwen_vl_ros.cli.main import main
from qwen_vl_ros.measure import interconnect
from qwen_vl_ros.measure.interconnect import (
    WAYS,
    Measured,
    Setting,
    analyse,
    choose,
    communication_share,
    contribution,
    fit_path,
    grid,
    load_tuning,
    measure,
    sensitivity,
    tuning,
)
from qwen_vl_ros.measure.links import Link, links, summary
from qwen_vl_ros.measure.transport import HandOver, Transport, compute_ms

SIZES = tuple(4096 * 16 ** i for i in range(4))


def modelled(setting):
    """Return the time of a link of 150 GB/s and 2 us, and of a host way of 20 GB/s and 9 us."""
    latency, rate = {'direct': (2.0, 150.0), 'staged pinned': (9.0, 20.0),
                     'staged pageable': (30.0, 6.0)}[setting.way]
    # Four pieces in two lanes overlap the halves of a staged copy.
    if setting.way == 'staged pinned' and setting.chunks >= 4 and setting.streams >= 2:
        rate *= 1.8
    latency += 1.0 * (setting.chunks - 1)
    return latency / 1e3 + setting.size / rate / 1e6 * (1.1 if setting.both else 1.0)


@pytest.fixture(scope='module')
def measured():
    return measure(grid(SIZES), modelled, runs=3)


def test_the_grid_is_full():
    settings = list(grid(SIZES))
    assert len(settings) == len(set(settings)) == 4 * 3 * 3 * 3 * 2


def test_one_run_does_not_count_and_the_median_does():
    calls = []

    def time_one(setting):
        calls.append(setting)
        return [100.0, 3.0, 1.0, 2.0][len(calls) - 1]

    found = measure([Setting(1000)], time_one, runs=3)
    assert found[0].times == (3.0, 1.0, 2.0) and found[0].ms == 2.0
    assert found[0].gb_s == pytest.approx(1000 / 2 / 1e6)
    assert Measured(Setting(1000, both=True), (2.0,)).gb_s == pytest.approx(1000 / 1e6)


def test_latency_and_bandwidth_are_recovered(measured):
    own = [m for m in measured if m.setting.way == 'direct' and not m.setting.both
           and m.setting.streams == m.setting.chunks == 1]
    way = fit_path(own)
    assert way.latency_us == pytest.approx(2.0) and way.gb_s == pytest.approx(150.0)
    assert way.error < 1e-9
    rng = random.Random(0)
    noisy = [Measured(m.setting, (m.ms * rng.uniform(0.97, 1.03),)) for m in own]
    way = fit_path(noisy)
    assert way.latency_us == pytest.approx(2.0, rel=0.05)
    assert way.gb_s == pytest.approx(150.0, rel=0.05) and 0 < way.error < 0.03
    with pytest.raises(ValueError, match='two sizes'):
        fit_path(own[:1])


def test_a_latency_is_never_negative():
    points = [Measured(Setting(s), (s / 100e6 * (0.5 if s < 1e6 else 1),)) for s in SIZES]
    assert fit_path(points).latency_us == 0.0


def test_contribution_is_the_formula_of_the_source():
    # alpha 0.68 and equal bandwidths give half of it.
    assert contribution(100, 100, 0.68) == pytest.approx(0.34)
    assert contribution(300, 100, communication_share(1.0, 3.0)) == pytest.approx(0.75 * 0.25)
    with pytest.raises(ValueError, match='expected 0 to 1'):
        contribution(1, 1, 1.5)


def test_sensitivity_of_an_additive_model_is_exact():
    settings = [Setting(size, streams=n) for size in (1, 2, 3) for n in (1, 2)]
    points = [Measured(s, (math.exp(2.0 * s.size + 1.0 * s.streams),)) for s in settings]
    ranking, noise = sensitivity(points, ('size', 'streams'))
    by_name = {s.factor: s for s in ranking}
    # Var(2 size) = 4 * 2/3, Var(streams) = 1/4.
    whole = 4 * 2 / 3 + 1 / 4
    assert by_name['size'].alone == by_name['size'].total == pytest.approx(4 * 2 / 3 / whole)
    assert by_name['streams'].alone == pytest.approx(1 / 4 / whole)
    assert [s.factor for s in ranking] == ['size', 'streams'] and noise == 0


def test_an_interaction_counts_for_both_factors_in_total_only():
    settings = [Setting(size, streams=n) for size in (1, 2) for n in (1, 2)]
    points = [Measured(s, (math.exp(1.0 if s.size == s.streams else 0.0),)) for s in settings]
    for found in sensitivity(points, ('size', 'streams'))[0]:
        assert found.alone == pytest.approx(0) and found.total == pytest.approx(1)


def test_sensitivity_wants_a_full_grid(measured):
    with pytest.raises(ValueError, match='full grid'):
        sensitivity(measured[:-1])
    with pytest.raises(ValueError, match='full grid'):
        sensitivity([*measured, measured[0]])


def test_noise_between_runs_is_told_apart():
    points = [Measured(Setting(s), (s * 0.9, s * 1.1)) for s in (1, 1000)]
    _, noise = sensitivity(points, ('size',))
    assert 0 < noise < 0.01
    same = [Measured(Setting(s), (0.5, 2.0)) for s in (1, 1000)]
    assert sensitivity(same, ('size',))[1] == pytest.approx(1.0)


def test_size_matters_most_then_the_way(measured):
    ranking, _ = sensitivity(measured)
    assert [s.factor for s in ranking[:2]] == ['size', 'way']
    assert all(s.total >= s.alone - 1e-12 for s in ranking)


def test_the_tuning_table_takes_the_fastest_and_among_equals_the_simplest(measured):
    table = tuning(measured)
    assert [r['size'] for r in table if not r['both']] == sorted(SIZES)
    assert {(r['way'], r['streams'], r['chunks']) for r in table} == {('direct', 1, 1)}
    host = tuning([m for m in measured if m.setting.way != 'direct'])
    large = next(r for r in host if r['size'] == max(SIZES))
    assert (large['way'], large['streams'], large['chunks']) == ('staged pinned', 2, 4)
    close = [Measured(Setting(10, streams=1), (1.02,)), Measured(Setting(10, streams=4), (1.0,))]
    assert tuning(close)[0]['streams'] == 1


def test_a_transfer_is_looked_up_by_the_nearest_size(measured, tmp_path):
    table = tuning(measured)
    assert choose(table, 1 << 40).way == 'direct' and choose(table, 5).size == 5
    with pytest.raises(ValueError, match='direction'):
        choose([r for r in table if r['both']], 5)
    path = tmp_path / 'tuning.json'
    path.write_text(json.dumps({'tuning': table}))
    assert load_tuning(path) == table
    for text, named in (('{', 'JSON'), ('{}', 'tuning'), ('{"tuning": [{}]}', 'tuning')):
        path.write_text(text)
        with pytest.raises(ValueError, match=named):
            load_tuning(path)
    with pytest.raises(ValueError, match='cannot be read'):
        load_tuning(tmp_path / 'none.json')


@pytest.mark.parametrize(('name', 'value'), [
    ('size', 'big'), ('size', 0), ('size', True), ('streams', 0), ('streams', 1.5),
    ('chunks', -1), ('chunks', None), ('both', 'no'), ('way', []), ('way', 'by air')])
def test_a_tuning_table_with_a_wrong_value_is_named(measured, tmp_path, name, value):
    table = tuning(measured)
    table[1] = table[1] | {name: value}
    path = tmp_path / 'x.json'
    path.write_text(json.dumps({'tuning': table}))
    with pytest.raises(ValueError, match=f'row 1 .*{name}') as caught:
        load_tuning(path)
    assert '\n' not in str(caught.value)


def test_an_incomplete_analysis_is_one_line(measured, tmp_path, capsys):
    result = analyse(measured, 1_201_152, 3.0)
    path = tmp_path / 'x.json'
    for name, value in (('hand_over', {}), ('ways', {'direct': {}}), ('sensitivity', [1]),
                        ('ways', [])):
        path.write_text(json.dumps(result | {name: value}))
        assert main(['interconnect', '--analyse', str(path)]) == 2
        error = capsys.readouterr().err
        assert 'incomplete' in error and error.count('\n') == 1


def test_the_whole_analysis(measured, tmp_path, capsys):
    result = analyse(measured, 1_201_152, 3.0)
    over = result['hand_over']
    assert over['direct_ms'] == pytest.approx(0.002 + 1_201_152 / 150e6)
    assert over['communication_share'] == pytest.approx(over['direct_ms'] / (
        over['direct_ms'] + 3.0))
    assert result['contribution'] == pytest.approx(150 / 170 * over['communication_share'])
    assert set(result['ways']) == {f'{w}, {d}' for w in WAYS for d in ('one way', 'both ways')}
    assert 'best setting by size' in format_result(result)
    path = tmp_path / 'x.json'
    path.write_text(json.dumps(result))
    assert main(['interconnect', '--analyse', str(path)]) == 0
    assert 'contribution of the link' in capsys.readouterr().out


# Copies

@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('both', [False, True])
def test_every_byte_arrives_however_it_is_cut(way, both):
    for size, streams, chunks in ((4096, 1, 16), (100_003, 4, 16), (65_536, 2, 3)):
        transport = Transport('cpu', 'cpu', size)
        assert transport.time_one(Setting(size, way, streams, chunks, both)) > 0
        assert transport.received(0, size)
        assert transport.received(1, size) == both


def hand_over_all(first, second):
    """Hand tensors over by every setting, poisoned targets in between."""
    import torch

    for setting in grid((4096, 1 << 18)):
        if setting.both:
            continue
        row = {'both': False, 'size': setting.size, 'way': setting.way,
               'streams': setting.streams, 'chunks': setting.chunks}
        over = HandOver(torch.device(first), torch.device(second), [row, row | {'both': True}])
        assert over.setting(5) == Setting(5, setting.way, setting.streams, setting.chunks)
        for shape in ((391, 96), (3, 5), (0, 96), (64, 1024)):
            x = torch.randn(shape, device=first, dtype=torch.bfloat16)
            out = over(x)
            assert out.dtype == x.dtype and out.device == torch.device(second)
            # On the target's stream, behind the copies.
            assert torch.equal((out + 0).cpu(), x.cpu())
            assert torch.equal(over(x.T).cpu(), x.T.cpu())


def test_a_hand_over_follows_the_tuning_table():
    import torch

    hand_over_all('cpu', 'cpu')
    cpu = torch.device('cpu')
    assert HandOver(cpu, cpu).setting(1 << 20) == Setting(1 << 20, 'direct', 1, 1)
    table = [{'both': False, 'size': 4096, 'way': 'direct', 'streams': 1, 'chunks': 1},
             {'both': False, 'size': 1 << 20, 'way': 'staged pinned', 'streams': 2, 'chunks': 4}]
    over = HandOver(cpu, cpu, table)
    assert over.setting(5000).way == 'direct' and over.setting(3 << 19).chunks == 4


@pytest.mark.gpu
def test_a_hand_over_on_a_gpu():
    hand_over_all('cuda:0', 'cuda:0')


def test_the_computation_beside_it_is_timed():
    import torch

    assert compute_ms(torch.device('cpu'), patches=8, width=16, layers=1, runs=1) > 0


@pytest.mark.gpu
def test_copies_between_two_gpus():
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip('one GPU only')
    transport = Transport('cuda:0', 'cuda:1', 1 << 20)
    for setting in grid((4096, 1 << 20)):
        assert transport.time_one(setting) > 0
        assert transport.received(0, setting.size)


# Links

class FakeNvml:
    NVML_FI_DEV_NVLINK_LINK_COUNT = 91
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90
    NVML_NVLINK_ERROR_DL_REPLAY = 0
    NVML_NVLINK_ERROR_DL_CRC_FLIT = 2
    NVML_NVLINK_CAP_P2P_SUPPORTED = 0

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetFieldValues(self, card, fields):
        value = {91: 2, 90: 25000}[fields[0]]
        return [SimpleNamespace(nvmlReturn=0, valueType=1, value=SimpleNamespace(uiVal=value))]

    def nvmlDeviceGetNvLinkState(self, card, link):
        return 1 - link

    def nvmlDeviceGetNvLinkVersion(self, card, link):
        return 5

    def nvmlDeviceGetNvLinkCapability(self, card, link, what):
        return 1

    def nvmlDeviceGetNvLinkRemotePciInfo(self, card, link):
        return SimpleNamespace(busId=b'00000000:05:00.0')

    def nvmlDeviceGetNvLinkErrorCounter(self, card, link, what):
        if what == 2:
            raise RuntimeError('Not Supported')
        return 3


def test_links_are_read_and_nothing_is_set():
    found = links(FakeNvml())
    assert len(found) == 4 and [link.active for link in found] == [True, False, True, False]
    assert found[0].version == 5 and found[0].mb_s == 25000
    assert found[0].remote == '00000000:05:00.0'
    assert found[0].errors == {'replay': 3} and found[0].capabilities == {'p2p': True}
    whole = summary(found)
    assert whole['active'] == 2 and whole['gb_s'] == 50.0 and whole['errors'] == {'replay': 12}
    text = format_links(whole)
    assert 'cannot be set' in text and 'Orin has no NVLink' in text and 'link 0: up' in text


def test_the_width_is_the_links_that_are_up_between_two_ends():
    pair = [Link(0, n, n != 2, remote='b') for n in range(3)]
    whole = summary([*pair, Link(0, 3, True, remote='c'), Link(1, 0, None, remote='a'),
                     Link(2, 0, True)])
    assert [(p['card'], p['remote'], p['width']) for p in whole['pairs']] == [
        (0, 'b', 2), (0, 'c', 1), (1, 'a', None), (2, None, None)]
    text = format_links(whole)
    assert 'card 0 to b: width 2 links' in text and 'card 1 to a: width unknown' in text


def test_a_card_without_links_has_none():
    class Plain(FakeNvml):
        def nvmlDeviceGetFieldValues(self, card, fields):
            raise RuntimeError('Not Supported')

        nvmlDeviceGetNvLinkState = nvmlDeviceGetFieldValues

    assert links(Plain()) == []
    assert summary([])['gb_s'] is None and 'no card' in format_links(summary([]))


def test_fewer_than_two_gpus_is_said_with_an_exit_code(capsys, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert main(['interconnect', '--json', '-']) == 1
    out, text = capsys.readouterr()
    assert 'two are needed' in text and 'Orin has no NVLink' in text
    assert json.loads(out)['links']['notes']
    assert main(['interconnect', '--links']) == 0


@pytest.mark.parametrize('words', [['--runs', '0'], ['--analyse', '/nowhere.json']])
def test_bad_input_is_named(capsys, words):
    assert main(['interconnect', *words]) == 2
    assert capsys.readouterr().err.count('\n') == 1


def test_the_command_on_two_devices(monkeypatch, capsys, tmp_path):
    """The whole command, with CPU buffers in place of the GPUs."""
    import torch

    from qwen_vl_ros.measure import transport as module

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 2)
    monkeypatch.setattr(torch.cuda, 'can_device_access_peer', lambda a, b: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda *a: 'a card')
    real = Transport
    monkeypatch.setattr(module, 'Transport', lambda a, b, n: real('cpu', 'cpu', n))
    monkeypatch.setattr(module, 'compute_ms', lambda device: 5.0)
    monkeypatch.setattr(interconnect, 'SIZES', (4096, 16384))
    path = tmp_path / 'tuning.json'
    assert main(['interconnect', '--runs', '1', '--json', str(path)]) == 0
    data = json.loads(path.read_text())
    assert len(data['measurements']) == 2 * 54 and load_tuning(path)
    assert {r['stage'] for r in data['records']} == {'interconnect'}
    assert 'what the time depends on' in capsys.readouterr().out
