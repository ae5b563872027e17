"""Libraries are found, checked, built by the package's own build, and can be missing."""

from __future__ import annotations

import ctypes
import importlib
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kernel_frames import frame_of

from qwen_vl_ros.engine.patches import extract_patches, pillow_patches
from qwen_vl_ros.kernels import loader
from qwen_vl_ros.kernels.encoder import FORMS
from qwen_vl_ros.kernels.loader import FOLDER, VARIABLE, KernelError
from qwen_vl_ros.kernels.patches import (
    ENCODINGS,
    ISAS,
    NativeFrame,
    NativePatches,
    default_patcher,
)

ROOT = Path(__file__).parents[2]
HEADER = ROOT / 'kernels' / 'include' / 'qwen_vl_kernels.h'


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Look for libraries in an empty folder only."""
    monkeypatch.setattr(loader, 'FOLDER', tmp_path / 'none')
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    caches = (loader.library, loader.optional, default_patcher)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path
    for cached in caches:
        cached.cache_clear()


def test_without_kernels_pillow_makes_the_patches(elsewhere, caplog):
    frame = frame_of('nv12', 100, 80)
    with caplog.at_level(logging.WARNING, 'qwen_vl_ros'):
        for _ in range(3):
            got = extract_patches([frame], (1, 6, 8))
    assert np.array_equal(got, pillow_patches([frame], (1, 6, 8)))
    lines = [r.getMessage() for r in caplog.records if 'qwen_vl_cpu' in r.getMessage()]
    assert len(lines) == 1
    assert "build it with 'make kernels'" in lines[0]
    assert 'Pillow' in lines[0]


def test_a_chosen_folder_comes_first(built, elsewhere):
    shutil.copy(FOLDER / 'libqwen_vl_cpu.so', elsewhere)
    assert loader.built() == ['libqwen_vl_cpu.so']
    assert loader.library('qwen_vl_cpu')._name == str(elsewhere / 'libqwen_vl_cpu.so')
    assert default_patcher() is not None


def test_a_broken_library_is_named(elsewhere, caplog):
    (elsewhere / 'libqwen_vl_cpu.so').write_text('no library')
    with pytest.raises(KernelError, match=r'libqwen_vl_cpu.so cannot be loaded: .*file too short'):
        loader.library('qwen_vl_cpu')
    assert default_patcher() is None
    assert 'cannot be loaded' in caplog.text


def test_another_version_is_refused(elsewhere):
    compiler = shutil.which('g++')
    if compiler is None:
        pytest.skip('g++ is not installed')
    source = elsewhere / 'old.cc'
    source.write_text('extern "C" int qwen_vl_abi_version(void) { return 0; }')
    subprocess.run([compiler, '-shared', '-fPIC', str(source), '-o',
                    str(elsewhere / 'libqwen_vl_cpu.so')], check=True)
    with pytest.raises(KernelError, match='ABI version 0, 1 is needed: build it again'):
        loader.library('qwen_vl_cpu')


def test_python_and_header_agree(tmp_path):
    """Numbers and structures that are written down on both sides of the interface."""
    text = HEADER.read_text()
    assert f'#define QWEN_VL_ABI_VERSION {loader.ABI_VERSION}\n' in text
    encoder = HEADER.with_name('qwen_vl_encoder.h').read_text()
    decode = HEADER.with_name('qwen_vl_decode.h').read_text()
    for name, header in (('ENCODER', encoder), ('DECODE', decode)):
        wanted = loader.ABI_VERSIONS[f'qwen_vl_{name.lower()}']
        assert f'#define QWEN_VL_{name}_ABI_VERSION {wanted}\n' in header
    for i, name in enumerate(FORMS):
        assert f'QWEN_VL_{name.upper()} = {i}' in encoder
    for i, name in enumerate(ENCODINGS):
        assert f'QWEN_VL_{name.upper()} = {i}' in text
    for i, name in enumerate(ISAS):
        assert f'QWEN_VL_ISA_{name.upper()} = {i}' in text
    compiler = shutil.which('g++')
    if compiler is None:
        pytest.skip('g++ is not installed')
    source = tmp_path / 'layout.cc'
    fields = [('qwen_vl_frame', NativeFrame), ('qwen_vl_patches', NativePatches)]
    checks = [f'static_assert(sizeof({c}) == {ctypes.sizeof(p)}, "");' for c, p in fields]
    checks += [f'static_assert(offsetof({c}, {name}) == {getattr(p, name).offset}, "");'
               for c, p in fields for name, *_ in p._fields_]
    source.write_text(f'#include "{HEADER}"\n' + '\n'.join(checks))
    subprocess.run([compiler, '-fsyntax-only', str(source)], check=True)


@pytest.fixture(scope='module')
def fuzz():
    """Import kernels/fuzz.py."""
    sys.path.insert(0, str(ROOT / 'kernels'))
    try:
        return importlib.import_module('fuzz')
    finally:
        sys.path.pop(0)


@pytest.fixture(scope='module')
def programs(fuzz):
    """Return a function that builds the fuzz program of a target and returns its command."""
    def prepare(target):
        if not shutil.which('g++'):
            pytest.skip('g++ is not installed')
        lacking = fuzz.missing(target)
        if lacking:
            pytest.skip(f'{", ".join(lacking)} not installed '
                        '(apt-get install g++-aarch64-linux-gnu qemu-user)')
        return fuzz.prepare(target, ROOT / 'build' / f'fuzz-{target}')

    return prepare


def run(command, cases, seed):
    done = subprocess.run([*command, str(cases), str(seed)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_fuzz_under_the_address_sanitizer(programs):
    said = run(programs('native'), 5000, 7)
    assert said.startswith('5000 cases, ')


@pytest.mark.slow
def test_neon_writes_the_same_bytes(programs):
    """Cross-compiled and under qemu-user: the digest of the same cases is that of x86."""
    here = run(programs('native'), 1500, 11)
    there = run(programs('aarch64'), 1500, 11)
    assert 'instruction sets 0x9' in there  # NEON and scalar
    assert here.split('digest ')[1] == there.split('digest ')[1]


def test_the_build_names_every_library():
    text = (ROOT / 'kernels' / 'CMakeLists.txt').read_text()
    libraries = set(re.findall(r'^ *qwen_vl_library\((\w+)', text, re.M))
    shown = ' '.join(re.findall(r'"[^"]*"', text))  # only messages are quoted
    assert len(libraries) == 6
    assert libraries == set(re.findall(r'lib(qwen_vl_\w+)', shown))


def test_a_failing_build_says_why(fuzz, tmp_path, monkeypatch):
    import build
    monkeypatch.setenv('PATH', str(tmp_path))
    monkeypatch.delenv('CXX', raising=False)
    with pytest.raises(build.BuildError, match=r'no C\+\+ compiler; get it with|no cmake'):
        build.build(tmp_path / 'lib', tmp_path / 'build')
