"""The fused encoder and prefill: here on their plain twins, on a GPU on the kernels."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from qwen_vl_ros.engine import cuda_encoder, cuda_prefill, graphs, quantize_vision
from qwen_vl_ros.engine.cuda_encoder import CudaEncoder
from qwen_vl_ros.engine.cuda_prefill import CudaPrefill
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.graphs import Direct, Graphs
from qwen_vl_ros.engine.kv_cache import KVCache
from qwen_vl_ros.engine.quant_linear import Int4Linear, Int8Linear
from qwen_vl_ros.kernels.encoder_plain import PlainKernels, PlainProducts
from qwen_vl_ros.kernels.prompt import PlainPrompt

GRIDS = ((1, 2, 2), (1, 12, 8), (1, 2, 100), (3, 6, 10), (1, 34, 46))


@pytest.fixture(params=['small', 'full'])
def model(request, engines):
    """Return a model on the CPU."""
    return engines[request.param].model


@pytest.fixture
def fused(model):
    """Return the fused encoder of a model on the plain twins; afterwards it is plain again."""
    vision = model.vision
    vision.fused = CudaEncoder(vision, PlainKernels(), PlainProducts(), Direct())
    blocks = vision.blocks
    yield vision
    vision.fused, vision.blocks = None, blocks


def patches_of(grid, seed=0):
    t, h, w = grid
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (t * h * w, 588 * (2 if t > 1 else 1)), dtype=torch.uint8,
                         generator=generator)


def plain(vision, patches, grid, units=None):
    x = vision.embed(patches)
    if units is not None:
        units = units.sort().values
        x = x.view(-1, 4, x.shape[1])[units].flatten(0, 1)
    return vision.encode_plain(x, grid, units)


@pytest.mark.parametrize('activated', [False, True])
@pytest.mark.parametrize('grid', GRIDS)
def test_the_same_tokens_for_any_grid(fused, grid, activated):
    """With fc1 and its activation as two kernels, and as one."""
    patches = patches_of(grid)
    fused.fused._reserve(4096, 64)
    fused.fused.activated[cuda_encoder.bucket(patches.shape[0])] = activated
    fused.fused.rotated[cuda_encoder.bucket(patches.shape[0])] = activated
    with torch.inference_mode():
        got, expected = fused.encode(patches, grid), plain(fused, patches, grid)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_kept_units_and_segments(fused):
    for grid, kept in (((1, 12, 8), [5]), ((1, 12, 8), [23, 0, 7, 8]),
                       ((3, 6, 10), [44, 2, 31, 30, 3]), ((4, 2, 2), [1, 3])):
        patches, units = patches_of(grid, 3), torch.tensor(kept)
        with torch.inference_mode():
            got = fused.encode(patches, grid, units)
            torch.testing.assert_close(got, plain(fused, patches, grid, units),
                                       rtol=1e-4, atol=1e-4)
            rows = patches.view(-1, 4, patches.shape[1])[units.sort().values].flatten(0, 1)
            assert torch.equal(got, fused.encode(fused.embed(rows), grid, units))


def test_pictures_do_not_see_each_other(fused):
    """Buffers are shared: neither a larger picture before nor a smaller one leaves a trace."""
    with torch.inference_mode():
        first = fused.encode(patches_of((1, 12, 8)), (1, 12, 8))
        fused.encode(patches_of((1, 34, 46), 1), (1, 34, 46))
        fused.encode(patches_of((1, 2, 2), 2), (1, 2, 2))
        assert torch.equal(first, fused.encode(patches_of((1, 12, 8)), (1, 12, 8)))
        assert fused.fused.buffer_bytes > 0
        fused.fused.release()
        assert torch.equal(first, fused.encode(patches_of((1, 12, 8)), (1, 12, 8)))


def test_a_mask_that_keeps_nothing_and_a_grid_outside_the_table(fused, monkeypatch):
    nothing = torch.tensor([], dtype=torch.int64)
    assert fused.encode(patches_of((1, 4, 4)), (1, 4, 4), nothing).shape == (
        0, fused.config.out_width)
    monkeypatch.setattr(cuda_encoder, 'POSITIONS', 3)
    monkeypatch.setattr(fused.fused, 'run', lambda *args: pytest.fail('ran outside its table'))
    fused.encode(patches_of((1, 4, 4)), (1, 4, 4))


@pytest.mark.parametrize('grid,kept', [
    ((1, 4, 4), [0, 4]), ((1, 4, 4), [-1, 2]), ((2, 4, 4), None), ((1, 4, 6), [0])])
def test_masks_and_patches_of_another_grid_are_refused(fused, grid, kept):
    """Before anything runs: on a GPU a wrong index would end the process."""
    units = None if kept is None else torch.tensor(kept)
    for own in (fused.fused, None):
        fused.fused = own
        with pytest.raises(EngineError) as caught:
            fused.encode(patches_of((1, 4, 4)), grid, units)
        assert caught.value.code == ErrorCode.BAD_REQUEST
    with pytest.raises(EngineError, match='12 patches came for a grid 1x4x4; expected 8'):
        fused.encode(torch.zeros(12, fused.config.width), (1, 4, 4), torch.tensor([1, 2]))


def test_after_running_out_of_memory_the_next_picture_works(fused, monkeypatch):
    grid = (1, 12, 8)
    with torch.inference_mode():
        expected = fused.encode(patches_of(grid), grid)
    real, calls = PlainKernels.activate, []

    def fail(self, *args):
        calls.append(args)
        if len(calls) == 2:
            raise torch.cuda.OutOfMemoryError('out of memory on purpose')
        return real(self, *args)

    monkeypatch.setattr(PlainKernels, 'activate', fail)
    with torch.inference_mode(), pytest.raises(torch.cuda.OutOfMemoryError):
        fused.encode(patches_of(grid), grid)
    assert not hasattr(fused.fused, '_x')
    with torch.inference_mode():
        assert torch.equal(expected, fused.encode(patches_of(grid), grid))


def test_what_has_no_kernels_is_named(model):
    vision, language = model.vision, model.language
    assert vision.fused is None and language.fused is None  # on a CPU
    assert 'float32 has no kernels' in CudaEncoder.fault(vision)
    assert 'float32 has no kernels' in CudaPrefill.fault(language)


@pytest.mark.parametrize('counts', [(1, 64), (64, 64), (65, 128), (1564, 1600), (4784, 4864)])
def test_buckets(counts):
    assert cuda_encoder.bucket(counts[0]) == counts[1]


def test_int8_is_near_and_gated(fused, monkeypatch, caplog):
    monkeypatch.setattr(quantize_vision, 'DEPTH', 1)
    grid = (1, 12, 8)
    with torch.inference_mode():
        before = fused.encode(patches_of(grid), grid)
        # Random weights are kind: nothing sticks out.
        outcome = quantize_vision.quantize_vision(fused, 'int8')
        assert outcome.name == 'int8' and outcome.mean_cosine > 0.999
        assert isinstance(fused.blocks[0].qkv, Int8Linear)
        after = fused.encode(patches_of(grid), grid)
    error = ((after - before).norm() / before.norm()).item()
    assert 0 < error < 0.1


@pytest.mark.parametrize('spoil', [False, True])
def test_int8_is_given_up_where_it_would_change_too_much(fused, monkeypatch, caplog, spoil):
    monkeypatch.setattr(quantize_vision, 'DEPTH', 1)
    if spoil:  # not a number is not near either
        block = fused.blocks[0]
        fused.blocks = [replace(block, norm1=(block.norm1[0] * torch.nan, block.norm1[1])),
                        *fused.blocks[1:]]
    else:
        monkeypatch.setattr(quantize_vision, 'WORST_COSINE', 0.9999999)
    with caplog.at_level(logging.WARNING):
        assert quantize_vision.quantize_vision(fused, 'int8').name == 'none'
    assert 'stays in floats' in caplog.text
    assert not isinstance(fused.blocks[0].qkv, Int8Linear)


def test_int8_without_kernels_or_of_another_kind(model, caplog):
    assert quantize_vision.quantize_vision(model.vision, 'none').name == 'none'
    with caplog.at_level(logging.WARNING):
        assert quantize_vision.quantize_vision(model.vision, 'int8').name == 'none'
    assert 'no INT8 kernels' in caplog.text
    with pytest.raises(EngineError) as caught:
        quantize_vision.quantize_vision(model.vision, 'int3')
    assert caught.value.code == ErrorCode.BAD_REQUEST


def prompt_of(language, n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, language.config.vocab, (n,), generator=generator)
    positions = torch.arange(n).repeat(3, 1)
    positions[1:, n // 3:] += torch.arange(n - n // 3) % 5
    return language.embed(ids), positions


@pytest.mark.parametrize('way', cuda_prefill.WAYS)
@pytest.mark.parametrize('sizes', [(9,), (64,), (70, 1, 30), (130, 65)])
def test_prefill_fills_the_cache_alike(model, monkeypatch, sizes, way):
    """In one piece, in chunks after each other, and in pieces of a chunk that is too large."""
    monkeypatch.setattr(cuda_prefill, 'MOST', 128)
    language = model.language
    fused = CudaPrefill(language, PlainKernels(), PlainProducts(), Direct(), PlainPrompt())
    fused._reserve(256)
    fused.ways = dict.fromkeys((64, 128), way)
    caches = [KVCache(language.config, 256, language.device, language.dtype) for _ in range(2)]
    x, positions = prompt_of(language, sum(sizes))
    caches[0].rows.fill_(float('nan'))
    caches[1].rows.fill_(float('nan'))
    start = 0
    with torch.inference_mode():
        for size in sizes:
            part = x[start:start + size], positions[:, start:start + size]
            got = fused.run(*part, caches[0], start)
            expected = language.prefill_plain(*part, caches[1], start)
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
            start += size
    torch.testing.assert_close(caches[0].rows, caches[1].rows, rtol=1e-4, atol=1e-4,
                               equal_nan=True)


@pytest.mark.parametrize('form', [Int8Linear, Int4Linear])
@pytest.mark.parametrize('copied', [False, True])
def test_prefill_through_quantised_weights(model, monkeypatch, form, copied):
    """Codes that are read as they are, and matrices that are written out into one room."""
    language = model.language
    monkeypatch.setattr(language, 'layers', [
        replace(x, qkv=form.of(x.qkv), out=form.of(x.out), gate_up=form.of(x.gate_up),
                down=form.of(x.down)) for x in language.layers])
    if copied:
        def wide(linear, x, room):
            weight = linear.dequantised(x.dtype)
            return room[:weight.numel()].view(weight.shape).copy_(weight)

        monkeypatch.setattr(form, 'wide', wide)
        monkeypatch.setattr(cuda_prefill, 'copies', lambda x: True)
    fused = CudaPrefill(language, PlainKernels(), PlainProducts(), Direct(), PlainPrompt())
    caches = [KVCache(language.config, 256, language.device, language.dtype) for _ in range(2)]
    x, positions = prompt_of(language, 90)
    with torch.inference_mode():
        for wanted in (None, 1):
            got = fused.run(x, positions, caches[0], 0, wanted)
            expected = language.prefill_plain(x, positions, caches[1], 0)
            torch.testing.assert_close(got, expected[-got.shape[0]:], rtol=1e-4, atol=1e-4)
    assert bool(fused._matrix.numel()) is copied


def test_prefill_takes_the_cache_that_it_is_given(model):
    language = model.language
    fused = CudaPrefill(language, PlainKernels(), PlainProducts(), Direct(), PlainPrompt())
    assert fused.fits(KVCache(language.config, 64, language.device, language.dtype))
    assert not fused.fits(KVCache(language.config, 64, language.device, torch.float16))


@pytest.mark.parametrize('rows,ms,most,expected', [
    (448, 3.0, 512, 512), (448, 40.0, 512, 192), (64, 40.0, 512, 64), (512, 20.0, 512, 512),
    (64, 1e-9, 100, 100), (448, 40.0, 30, 30)])
def test_a_chunk_keeps_a_cancel_waiting_20_ms_at_most(model, rows, ms, most, expected):
    language = model.language
    fused = CudaPrefill(language, PlainKernels(), PlainProducts(), Direct(), PlainPrompt())
    assert fused.chunk(most) == most
    fused.graphs.captured += [
        graphs.Captured((64, None), 0, 0, 0, 9.0), graphs.Captured((rows, 1), 0, 0, 0, ms)]
    if rows > 64:
        assert fused.chunk(most) == expected
    assert language.chunk(most) == most  # in plain torch nothing is known


class FakeGraph:
    """A graph that replays what was called between begin and end."""

    recording: list | None = None

    def capture_begin(self, capture_error_mode):
        assert capture_error_mode == 'thread_local'
        self.calls = FakeGraph.recording = []

    def capture_end(self):
        FakeGraph.recording = None

    def replay(self):
        for call in self.calls:
            call()


@pytest.fixture
def fake_cuda(monkeypatch):
    """Let graphs be captured without a device; gives who waited for whom."""
    waits = []

    class Stream:
        def __init__(self, *args):
            pass

        def wait_stream(self, other):
            waits.append((self, other))

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

    class Event(Stream):
        def record(self, stream):
            pass

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return 2.5

    monkeypatch.setattr(torch.cuda, 'Event', lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', FakeGraph)
    monkeypatch.setattr(torch.cuda, 'Stream', Stream)
    monkeypatch.setattr(torch.cuda, 'stream', lambda stream: stream)
    monkeypatch.setattr(torch.cuda, 'current_stream', lambda device: Stream())
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (100, 200))
    return waits


def test_a_graph_sees_fresh_inputs_also_at_first_use(fake_cuda):
    """A body that spoils its input (a residual stream) runs twice before the first replay."""
    state = {'x': 0}
    prepared = []

    def body():
        def work():
            state['x'] += 1

        if FakeGraph.recording is not None:
            FakeGraph.recording.append(work)  # recorded, not run
        else:
            work()

    found = Graphs(torch.device('cuda'), 'test', most=2)
    for key, start in (('a', 10), ('a', 20), ('b', 30), ('c', 40), ('a', 50)):
        found.run(key, lambda start=start: state.update(x=start), body,
                  lambda key=key: prepared.append(key))
        assert state['x'] == start + 1
    assert prepared == ['a', 'b', 'c', 'a']  # two are kept: the oldest had to be made again
    assert [one.key for one in found.captured] == prepared
    assert len(found) == 2


@pytest.mark.parametrize('when', ['at first', 'captured'])
def test_a_capture_that_fails_leaves_no_graph(fake_cuda, monkeypatch, when):
    def body():
        if when == 'at first' or FakeGraph.recording is not None:
            raise RuntimeError('out of memory')

    def end(self):
        FakeGraph.recording = None
        raise RuntimeError('the capture was invalidated')

    monkeypatch.setattr(FakeGraph, 'capture_end', end)
    found = Graphs(torch.device('cuda'), 'test')
    with pytest.raises(RuntimeError, match='out of memory'):
        found.run('a', lambda: None, body, lambda: None)
    # The side stream waited for the outer one, and that for what the side stream had begun.
    (side, outer), (last, begun) = fake_cuda
    assert begun is side and last is outer
    assert len(found) == 0 and not found.captured
    assert graphs.Direct().captured == []


@pytest.mark.parametrize('wrong', ['never', 'always', 'once', 'not a number'])
def test_a_form_of_attention_that_errs_is_not_chosen(wrong, caplog):
    runs = {'sure': 0, 'quick': 0}

    def attend(form):
        runs[form] += 1
        out = torch.ones(6, 4)
        if form == 'quick':
            out *= 1.001
            if wrong == 'always' or (wrong == 'once' and runs[form] == 3):
                out[2] = 0
            if wrong == 'not a number':
                out[5] = float('nan')
        return out

    found = cuda_encoder.trusted(attend, ['sure', 'quick'])
    assert found == (['sure', 'quick'] if wrong == 'never' else ['sure'])
    assert ('quick is not used' in caplog.text) == (wrong != 'never')
