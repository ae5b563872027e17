"""Arithmetic of the benchmark stages that need a GPU to run."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys

import pytest
import torch

from benchmarks.records import record, table
from benchmarks.stages import decode
from benchmarks.stages.quantized import paired
from benchmarks.stages.stream import Noted
from qwen_vl_ros.cli.bench import QUICK, ROOT
from qwen_vl_ros.engine.generate import Choice


def test_pairs_say_what_was_lost_and_how_sure_that_is():
    rows = [((True, True), 900), ((True, False), 15), ((False, True), 5), ((False, False), 80)]
    lost, half = paired(rows)
    assert lost == pytest.approx(0.01)
    # Variance of 15 times +1, 5 times -1 and 980 times 0.
    assert half == pytest.approx(1.96 * math.sqrt((0.02 - 0.0001) / 1000))
    assert paired([((True, True), 300)]) == (0.0, 0.01)


def test_a_projection_takes_the_share_to_an_orin_and_is_marked():
    bench = decode.Bench(argparse.Namespace(json=None), torch.device('cpu'), 4800.0, 4300.0)
    # 3.09 GB in 1.2 ms are 2,575 GB/s: 53.6 % of the pin rate.
    made = bench.projected({'model': '2b', 'dtype': 'bf16', 'path': 'cuda', 'context': 512},
                           3_090_000_000, 2575 / 4800)
    assert made['kind'] == 'projected' and made['case']['device'] == 'orin-agx-64'
    assert made['value'] == pytest.approx(3090 / (204.8 * 2575 / 4800), rel=1e-3)
    assert 'path' not in made['case'] and 'Orin' in made['machine']
    measured = record('decode', {'model': '2b'}, 'ms_per_token', 1.2, 'ms')
    lines = table([measured, made]).splitlines()
    assert 'projected' not in lines[0] and '(projected)' in lines[1]


def test_a_noted_decoder_is_the_decoder_and_knows_when_it_chose():
    class Inner:
        slots = 3

        def step(self, allowed=None):
            return {0: Choice(5, 1.0, 2.0, allowed is None)}

    noted = Noted(Inner())
    assert noted.slots == 3
    assert noted.step()[0].finite and not noted.step({})[0].finite
    assert len(noted.at) == 2 and noted.at[0] <= noted.at[1]


def test_stages_are_there_without_ros_and_optional_packages():
    """What a stage lacks it says when it runs; a machine without ROS still times the rest."""
    done = subprocess.run([sys.executable, '-c', WITHOUT], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr


WITHOUT = '''
import importlib, pathlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('rclpy', 'qwen_vl_msgs', 'sensor_msgs', 'simplejpeg', 'rosbags',
                                  'opentelemetry', 'prometheus_client', 'matplotlib', 'pynvml'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Missing())
for path in sorted(pathlib.Path('benchmarks/stages').glob('[a-z]*.py')):
    importlib.import_module(f'benchmarks.stages.{path.stem}')
'''


def test_quick_names_options_that_stages_have():
    import importlib

    for name, words in QUICK.items():
        assert (ROOT / 'benchmarks' / 'stages' / f'{name}.py').exists()
        parser = argparse.ArgumentParser()
        importlib.import_module(f'benchmarks.stages.{name}').add_arguments(parser)
        parser.parse_args(words)
