"""Files of records: what is refused, compared and rendered; and the command over two stages."""

import json
import sys
from pathlib import Path

import pytest

from qwen_vl_ros.cli import bench as command
from qwen_vl_ros.cli.main import main
from qwen_vl_ros.measure.bench import (
    BEGIN,
    END,
    compare_records,
    format_changes,
    kept_files,
    load_records,
    render,
    results_name,
    tables,
)
from qwen_vl_ros.measure.headline import headline_records
from qwen_vl_ros.measure.record import record

ROOT = Path(__file__).parents[2]


def made(stage='decode', metric='ms_per_token', value=10.0, unit='ms', kind='measured', **case):
    return record(stage, {'model': 'tiny', **case}, metric, value, unit, runs=3, kind=kind,
                  baseline=('transformers eager', 2 * value))


@pytest.fixture(scope='module')
def records():
    return [made(size='320x240'), made(size='640x480', value=20.0),
            made('answer', 'answers_per_s', 5.0, '1/s', size='320x240'),
            made('answer', 'ms', 200.0, size='320x240'),
            made('decode', 'ms_per_token', 0.7, kind='computed', size='320x240')]


def write(path, rows):
    path.write_text(json.dumps(rows))
    return path


def test_a_file_of_records_is_read(tmp_path, records):
    assert load_records(write(tmp_path / 'a.json', records)) == records


@pytest.mark.parametrize(('content', 'named'), [
    ('{', 'JSON'), ('{}', 'list'), ('[1]', 'record 1 lacks'),
    ('[{"stage": "x"}]', 'lacks case')])
def test_what_is_no_record_is_named(tmp_path, content, named):
    path = tmp_path / 'bad.json'
    path.write_text(content)
    with pytest.raises(ValueError, match=named):
        load_records(path)


def test_another_kind_is_refused(tmp_path, records):
    with pytest.raises(ValueError, match="kind 'guessed'"):
        load_records(write(tmp_path / 'a.json', [records[0] | {'kind': 'guessed'}]))
    with pytest.raises(ValueError, match='cannot be read'):
        load_records(tmp_path / 'none.json')


def test_less_time_and_more_answers_are_better(records):
    after = [r | {'value': r['value'] * 1.25} for r in records]
    found = {c.name.split(' (')[0] + c.name[-9:-1]: c for c in compare_records(records, after)}
    assert len(found) == 4, 'computed figures are not compared'
    assert found['decode ms_per_token=320x240'].verdict() == 'regressed'
    assert found['answer answers_per_s=320x240'].verdict() == 'improved'
    assert found['answer ms=320x240'].gain == pytest.approx(0.8)


def test_small_changes_are_noise_and_the_worst_comes_first(records):
    after = [r | {'value': r['value'] * f} for r, f in zip(records, (1.05, 3.0, 1.0, 0.5, 1))]
    changes = compare_records(records, after)
    assert [c.verdict() for c in changes] == ['regressed', 'same', 'same', 'improved']
    text = format_changes(changes)
    assert text.splitlines()[0].startswith('regressed') and '640x480' in text.splitlines()[0]
    assert text.splitlines()[-1] == '2 of 4 within 10%'
    assert compare_records(records, [made(size='1x1')]) == []


def test_zero_is_compared_too():
    zero, one = made('eval', 'accuracy', 0.0, ''), made('eval', 'accuracy', 0.5, '')
    assert compare_records([zero], [one])[0].verdict() == 'improved'
    assert compare_records([one], [zero])[0].verdict() == 'regressed'
    assert compare_records([zero], [zero])[0].verdict() == 'same'


def test_kinds_never_share_a_table(records):
    text = tables(records)
    assert '**decode**, measured (model tiny)' in text and '**decode**, computed' in text
    measured = next(p for p in text.split('**decode**') if p.startswith(', measured'))
    assert '20 ms' in measured and '0.7 ms' not in measured.split('**')[0]


def test_a_readme_is_rendered_between_its_marks_and_again_the_same(tmp_path, records):
    folder = tmp_path / 'results'
    folder.mkdir()
    write(folder / 'box.json', records)
    write(folder / 'orin-projected.json', headline_records())
    readme = tmp_path / 'README.md'
    readme.write_text(f'# before\n{BEGIN}\nold\n{END}\nafter\n')
    assert render(folder, readme) == [readme, folder / 'box.png']
    text = readme.read_text()
    assert text.startswith('# before') and text.endswith('after\n') and 'old' not in text
    assert '### box' in text and '![box' in text and 'transformers eager' in text
    assert '| 640x480 | 100% | fp16 | 33 tokens |' in text and 'projected, not measured' in text
    render(folder, readme)
    assert readme.read_text() == text
    readme.write_text('no marks')
    with pytest.raises(ValueError, match='must hold'):
        render(folder, readme)


def test_the_readme_of_the_repository_has_its_marks():
    text = (ROOT / 'benchmarks' / 'README.md').read_text()
    assert text.count(BEGIN) == text.count(END) == 1


def test_files_of_the_repository_are_records():
    for path in (ROOT / 'benchmarks' / 'results').glob('*.json'):
        assert load_records(path), path


def test_every_stage_keeps_to_the_dispatchers_contract():
    import importlib
    import sys

    sys.path.insert(0, str(ROOT))
    stages = [p.stem for p in (ROOT / 'benchmarks' / 'stages').glob('*.py') if p.stem[0] != '_']
    assert set(command.QUICK) <= set(stages)
    for name in stages:
        module = importlib.import_module(f'benchmarks.stages.{name}')
        assert callable(module.add_arguments) and callable(module.run)


def test_the_profilers_figures_stand_beside_our_own():
    from benchmarks.stages._counters import READ, STORED, WRITTEN, NoProfiler, parse

    names = ['ID', 'Kernel Name', READ, WRITTEN, STORED]
    rows = [['', '', 'byte', 'byte', 'byte']]
    # make_patches, project, embed, project: once to warm up, once counted.
    for turn in (9, 1):
        rows += [[str(turn), 'make_patches(Picture)', f'{2_764_800 * turn:,}', '0', '2,812,992'],
                 [str(turn), 'void project<__half>', '4,369,472', '99', '12,247,040'],
                 [str(turn), 'void embed<__half>', '4,753,408', '0', '12,247,040'],
                 [str(turn), 'void project<__half>', '2,476,112', '0', '4,003,840']]
    text = [','.join(f'"{cell}"' for cell in row) for row in (names, *rows)]
    found = parse(['==PROF== noise', *text])
    assert [round(one.off, 3) for one in found] == [0.0, 0.0, 0.026, 0.0]
    assert found[1].written == 99 and found[0].read == 2_764_800
    for lines, words in (([], 'said nothing'), (['==ERROR== no counters'], 'no counters'),
                         (text[:4], '2 launches')):
        with pytest.raises(NoProfiler, match=words):
            parse(lines)


def test_windows_change_places_and_give_an_interval():
    from benchmarks.stages._node import interval, windows

    clock, order = [0.0], []

    def work(on):
        order.append(on)
        clock[0] += 1.02 if on else 1.0

    taken = windows(work, 50, lambda on: clock.__setitem__(0, clock[0] + 7.0),
                    {'seconds': lambda: clock[0]})
    assert (len(order) == 100 and order[:2] != order[2:4]) or order[4:6] != order[:2]
    middle, low, high = interval(taken['seconds'][True], taken['seconds'][False])
    assert middle == pytest.approx(1.02) and low <= middle <= high
    noisy = [1.0 + 0.3 * (i % 7) for i in range(50)]
    middle, low, high = interval(noisy, noisy[::-1])
    assert low < middle < high


def test_a_command_names_no_place_outside(monkeypatch, tmp_path):
    from qwen_vl_ros.measure.record import command

    monkeypatch.setattr(sys, 'argv', [
        str(ROOT / 'benchmarks' / 'run.py'), '--json', str(tmp_path / 'x.json'), '--size', '1x2'])
    assert command() == 'python benchmarks/run.py --json x.json --size 1x2'


def test_this_machine_has_a_name():
    assert results_name() and ' ' not in results_name()


# The command.

def test_two_stages_run_and_one_is_left_out(tmp_path, capsys, monkeypatch):
    path = tmp_path / 'here.json'
    monkeypatch.setitem(command.QUICK, 'roofline', ['--most-rows', '1', '--threads', '1'])
    words = ['bench', '--quick', 'roofline', 'interconnect', '--results', str(path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    rows = load_records(path)
    assert {r['stage'] for r in rows} >= {'roofline'} and all(r['value'] > 0 for r in rows)
    if 'interconnect' not in {r['stage'] for r in rows}:
        assert 'left out: interconnect' in out


def test_a_quick_run_leaves_the_kept_figures_alone(tmp_path, monkeypatch, records):
    results = tmp_path / 'benchmarks' / 'results'
    results.mkdir(parents=True)
    (tmp_path / 'benchmarks' / 'stages').mkdir()
    (tmp_path / 'benchmarks' / 'stages' / 'patches.py').write_text('')
    # Stands in for a stage: writes where it is told to.
    (tmp_path / 'benchmarks' / 'run.py').write_text(
        'import sys\n'
        "open(sys.argv[sys.argv.index('--json') + 1], 'w').write('[]')\n"
        "open('words', 'w').write(' '.join(sys.argv))\n")
    kept = write(results / f'{results_name()}.json', records)
    before = kept.read_bytes()
    monkeypatch.setattr(command, 'ROOT', tmp_path)
    assert main(['bench', '--quick', 'patches']) == 0
    quick = results / f'{results_name()}-quick.json'
    assert kept.read_bytes() == before and quick.exists()
    assert sorted(results.iterdir()) == sorted([kept, quick]), 'a projection was written'
    assert '--sizes 640x480 ' in f"{(tmp_path / 'words').read_text()} "
    assert kept_files(results) == [kept]


def test_two_files_are_compared_strictly_if_wanted(tmp_path, capsys, records):
    old = write(tmp_path / 'old.json', records)
    new = write(tmp_path / 'new.json', [r | {'value': r['value'] * 2} for r in records])
    words = ['bench', '--compare', str(old), str(new)]
    assert main(words) == 0
    assert 'regressed' in capsys.readouterr().out
    assert main([*words, '--strict']) == 1
    assert main(['bench', '--compare', str(old), str(old), '--strict']) == 0
    other = write(tmp_path / 'other.json', [r | {'machine': 'another'} for r in records])
    main(['bench', '--compare', str(old), str(other)])
    assert 'different machines' in capsys.readouterr().out


@pytest.mark.parametrize(('words', 'named'), [
    (['nonsense'], "'nonsense'"), (['--compare', '/nowhere', '/nowhere'], '/nowhere'),
    (['--tolerance', '-1'], '--tolerance')])
def test_bad_input_is_named(capsys, words, named):
    assert main(['bench', *words]) == 2
    assert named in capsys.readouterr().err


def test_stages_are_listed(capsys):
    assert main(['bench', '--list']) == 0
    assert 'answer' in capsys.readouterr().out.split()
