"""The light head: its file, its inputs, and that it sees what the question names."""

from __future__ import annotations

import threading
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.roboscene.evaluate import frames_of
from qwen_vl_ros.roboscene.items import items
from qwen_vl_ros.saliency.head import SaliencyHead, channels, from_int8, to_int8
from qwen_vl_ros.saliency.head_int8 import Int8Conv, Int8Head, available
from qwen_vl_ros.saliency.head_recorded import FoldedHead, Source, held_against
from qwen_vl_ros.saliency.head_signal import HeadSignal
from qwen_vl_ros.saliency.samples import PACKED, planes, rgb_samples
from qwen_vl_ros.saliency.selectors import FILE, make_selector
from qwen_vl_ros.saliency.uploading import WAYS

TINY = Path(__file__).parents[2] / 'models' / 'tiny'
GRID = (1, 24, 32)


@pytest.fixture(scope='module')
def engine():
    loaded = Engine.load(str(TINY), device='cpu', selector=make_selector('head', model=TINY))
    yield loaded
    loaded.close()


def _fresh(text_width: int = 32) -> SaliencyHead:
    torch.manual_seed(0)
    return SaliencyHead(text_width, width=16, stem=8).eval().requires_grad_(False)


def test_a_head_is_read_as_it_was_written(tmp_path):
    head = _fresh()
    path = tmp_path / FILE
    head.save(path, {'checkpoint': 'x'})
    read = SaliencyHead.load(path)
    assert read.shape == head.shape and path.stat().st_size < 1.3 * sum(
        p.numel() for p in head.parameters()) + 4096
    for (name, a), b in zip(head.state_dict().items(), read.state_dict().values()):
        bound = a.abs().flatten(1).amax(1) / 254 + 1e-7 if a.dim() > 1 else torch.zeros(len(a))
        assert ((a - b).abs().reshape(len(a), -1) <= bound[:, None]).all(), name
    rounded, scale = to_int8(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    assert rounded.tolist() == [[64, -127], [0, 0]]
    assert from_int8(rounded, scale)[0].tolist() == pytest.approx([1.0079, -2.0], abs=1e-4)


def test_a_file_that_is_no_head_is_named(tmp_path):
    with pytest.raises(ValueError, match='is no saliency head'):
        SaliencyHead.load(TINY / 'model.safetensors')
    (tmp_path / FILE).write_bytes(b'nothing')
    with pytest.raises(ValueError, match='cannot be read as a saliency head'):
        SaliencyHead.load(tmp_path / FILE)
    with pytest.raises(ValueError, match='has no saliency head'):
        make_selector('head', model=tmp_path / 'other')
    assert set(make_selector('auto', model=tmp_path / 'other').weights) == {
        'contrast', 'gradient'}


def _with(value: float):
    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[0] = value
        return tensor
    return changed


@pytest.mark.parametrize(('name', 'change', 'expected'), [
    ('units.weight', lambda t: t[1:].contiguous(),
     r'tensor units.weight is \[15, 8, 7, 7\]; its header makes it \[16, 8, 7, 7\]'),
    ('units.weight.scale', lambda t: t[1:].contiguous(),
     r'tensor units.weight.scale is \[15\]; its header makes it \[16\]'),
    ('units.weight', lambda t: t.float(), r'units.weight is torch.float32; expected torch.int8'),
    ('film.bias', lambda t: None, r'tensor film.bias is missing; expected one of \[64\]'),
    ('more', lambda t: torch.zeros(1), 'tensor more is not expected'),
    ('film.bias', _with(float('nan')), 'tensor film.bias holds values that are not finite'),
    ('word.weight.scale', _with(float('inf')),
     'tensor word.weight.scale holds values that are not finite')])
def test_a_damaged_head_is_refused_by_file_and_tensor(tmp_path, name, change, expected):
    path = tmp_path / FILE
    _fresh().save(path, {})
    with safe_open(path, 'pt') as file:
        about = file.metadata()
    tensors = load_file(path)
    changed = change(tensors.pop(name, None))
    save_file(tensors if changed is None else {**tensors, name: changed}, path, about)
    with pytest.raises(ValueError, match=expected) as caught:
        SaliencyHead.load(path)
    assert str(caught.value).startswith(f'{path}: ') and '\n' not in str(caught.value)


@pytest.mark.parametrize('shape', ['{"width": 16}', '[1]', '{', '{"text_width": -3}'])
def test_a_head_whose_header_makes_no_net_is_refused(tmp_path, shape):
    path = tmp_path / FILE
    _fresh().save(path, {'shape': shape})
    with pytest.raises(ValueError, match='its header gives the shape'):
        SaliencyHead.load(path)


def test_a_head_of_another_width_is_refused(tmp_path):
    _fresh(32).save(tmp_path / FILE, {})
    with pytest.raises(ValueError, match='reads embeddings of width 32, the checkpoint has 256'):
        Engine.load(str(TINY), device='cpu', selector=make_selector('head', head=tmp_path / FILE))


def test_padding_of_a_question_changes_nothing():
    head = _fresh()
    words = torch.randn(1, 5, 32)
    padded = torch.cat((words, torch.randn(1, 4, 32)), 1)
    mask = torch.arange(9)[None] < 5
    assert torch.allclose(head.words(words, mask[:, :5]), head.words(padded, mask), atol=1e-6)


@pytest.mark.parametrize('encoding', ['bgr8', 'mono8', 'nv12', 'nv21', 'yuyv', 'uyvy'])
def test_samples_are_rgb_whatever_the_camera_sends(encoding):
    rgb = np.zeros((336, 448, 3), np.uint8)
    rgb[:, :224] = (200, 60, 40)
    rgb[:, 224:] = (40, 80, 210)
    expected = rgb_samples(Frame.from_rgb(rgb), 12, 16)
    y = (0.257 * rgb[..., 0] + 0.504 * rgb[..., 1] + 0.098 * rgb[..., 2] + 16)
    u = (-0.148 * rgb[..., 0] - 0.291 * rgb[..., 1] + 0.439 * rgb[..., 2] + 128)
    v = (0.439 * rgb[..., 0] - 0.368 * rgb[..., 1] - 0.071 * rgb[..., 2] + 128)
    y, u, v = (np.round(p).astype(np.uint8) for p in (y, u, v))
    if encoding == 'bgr8':
        data, step = rgb[..., ::-1], 448 * 3
    elif encoding == 'mono8':
        data, step = y, 448
        expected = np.repeat(rgb_samples(Frame.from_rgb(np.dstack([y] * 3)), 12, 16)[..., :1],
                             3, axis=2)
    elif encoding in ('nv12', 'nv21'):
        pair = (u, v) if encoding == 'nv12' else (v, u)
        chroma = np.stack([p[::2, ::2] for p in pair], -1)
        data, step = np.concatenate([y.reshape(-1), chroma.reshape(-1)]), 448
    else:
        quad = np.stack((y[:, ::2], u[:, ::2], y[:, 1::2], v[:, ::2]), -1)
        data = quad if encoding == 'yuyv' else quad[..., [1, 0, 3, 2]]
        step = 896
    flat = np.ascontiguousarray(data).reshape(-1)
    got = rgb_samples(Frame(flat, encoding, 448, 336, step), 12, 16)
    assert got.shape == expected.shape and np.abs(got - expected).max() < 4


def test_the_signal_is_the_net_on_the_frames_samples(engine):
    signal = engine.options.selector.signals['head']
    item = next(items('change', 'test', 1))
    first, _, second, _ = frames_of(item)
    got = signal([first, second], 12, 16, item.question.text)
    both = torch.stack([torch.from_numpy(rgb_samples(f, 12, 16)).permute(2, 0, 1)
                        for f in (first, second)])
    ids = torch.tensor([engine.tokenizer(item.question.text)['input_ids']])
    embedded = engine.model.language.embed(ids).float()
    with torch.inference_mode():
        words = signal.head.words(embedded, torch.ones_like(ids, dtype=torch.bool))
        expected = signal.head(channels(both, both.flip(0)), words.expand(2, -1)).numpy()
    assert got.shape == (2, 12, 16) and np.allclose(got, expected, atol=1e-4)
    with pytest.raises(RuntimeError, match='not bound'):
        HeadSignal(_fresh())([first], 12, 16, 'what?')


def test_the_question_decides_what_is_kept(engine):
    """The same picture, asked about one thing and about another."""
    selector, share = engine.options.selector, []
    for item in items('attribute', 'test', 30):
        thing = next(t for t in item.scenes[0].things if t.name.split()[0] in item.question.text
                     or t.shape in item.question.text)
        frame = frames_of(item)
        mask = selector(frame, GRID, 0.11, item.question.text)
        other = next((t for t in item.scenes[0].things if t.colour != thing.colour
                      and t.shape != thing.shape and t.area > 3000), None)
        if other is None:
            continue
        asked = selector(frame, GRID, 0.11, f'Where is the {other.name}?')
        from qwen_vl_ros.roboscene.geometry import units_of_box
        own, its = sorted(units_of_box(thing.box)), sorted(units_of_box(other.box))
        share.append((mask[own].mean(), asked[own].mean(), asked[its].mean(), mask[its].mean()))
    here, elsewhere, there, before = np.mean(share, 0)
    assert len(share) >= 5 and here > elsewhere + 0.2 and there > before + 0.2


def test_a_third_of_the_units_answers_as_well(engine):
    right = {1.0: 0, 0.33: 0}
    for family in ('attribute', 'pointing', 'number', 'far'):
        for item in items(family, 'test', 6, 9):
            for ratio in right:
                request = Request(item.question.text, (Visual(frames_of(item)),),
                                  keep_ratio=ratio, max_new_tokens=8)
                got = next(e.answer for e in engine.answer(request) if isinstance(e, Done))
                right[ratio] += got.text == item.question.answer
    assert right[0.33] >= right[1.0] - 2 and right[1.0] >= 20


def test_flops_are_those_of_the_layers():
    head = _fresh()
    counted = 0

    def count(module, given, out):
        nonlocal counted
        counted += 2 * out[0, 0].numel() * module.weight.numel()

    for module in head.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(count)
    head(torch.zeros(1, 6, 21, 28), torch.zeros(1, 32))
    text = 2 * (5 * (head.word.weight.numel() + head.phrase.weight.numel())
                + head.film.weight.numel())
    assert head.flops(3, 4, 5) == counted + text


@pytest.mark.skipif(not available(), reason='this torch multiplies no int8 matrices on a CPU')
def test_int8_on_the_cpu_chooses_as_float_does(engine):
    head = SaliencyHead.load(TINY / FILE)
    signal = HeadSignal(SaliencyHead.load(TINY / FILE), torch.int8)
    signal.bind(engine)
    plain = engine.options.selector.signals['head']
    shared = []
    for item in items('relation', 'test', 6):
        frame, = frames_of(item)
        a, b = (s([frame], 12, 16, item.question.text) for s in (plain, signal))
        assert np.linalg.norm(a - b) < 0.03 * np.linalg.norm(a - a.mean())
        best = [set(np.argsort(-m.reshape(-1))[:63]) for m in (a, b)]
        shared.append(len(best[0] & best[1]) / 63)
    assert np.mean(shared) > 0.97
    with pytest.raises(ValueError, match='no whole units'):
        Int8Head(head)(torch.zeros(1, 6, 20, 28), torch.zeros(1, 192))


@pytest.mark.parametrize('conv', [torch.nn.Conv2d(8, 16, 3, padding=1),
                                  torch.nn.Conv2d(8, 16, 7, stride=7)])
@pytest.mark.skipif(not available(), reason='this torch multiplies no int8 matrices on a CPU')
def test_an_int8_convolution_is_exact_on_what_int8_holds(conv):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        conv.weight.copy_(torch.randint(-127, 128, conv.weight.shape, generator=generator))
        conv.weight.flatten(1)[:, 0] = 127
        x = torch.randint(-127, 128, (2, 8, 14, 21), generator=generator).float()
        x[:, 0, 0, 0] = 127
        expected = conv.double()(x.double())
        got = Int8Conv(conv.float())(x)
    assert (got.double() - expected).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize('slices', [1, 2, 3])
def test_the_folded_net_gives_what_the_plain_one_gives(slices):
    head = SaliencyHead.load(TINY / FILE)
    generator = torch.Generator().manual_seed(slices)
    pixels = torch.randint(0, 256, (slices, 3, 21, 28), generator=generator, dtype=torch.uint8)
    questions = torch.randn(2, 192, generator=generator)
    folded, plain = FoldedHead(head, slices, 3, 4), SaliencyHead.load(TINY / FILE).double()
    given = channels(pixels, held_against(pixels))
    shown = 64 * (given[:, :3] if slices == 1 else given)
    for question in (questions[:1], questions[1:], questions[:1]):
        folded.ask(question)
        expected = plain(given.double(), question.double().expand(slices, -1))
        assert (folded(shown) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert held_against(pixels[:1]) is None
    turned = FoldedHead(head, slices, 3, 4, order=(2, 1, 0))
    turned.ask(question)
    groups = shown.view(slices, -1, 3, *shown.shape[2:])
    assert torch.allclose(turned(groups.flip(2).flatten(1, 2)), folded(shown), atol=1e-4)


@pytest.mark.parametrize('encoding', ['rgb8', 'bgra8', 'mono8', 'nv12', 'nv21', 'yuyv', 'uyvy'])
def test_a_device_makes_the_colours_that_the_host_makes(encoding):
    frame = _sent(frames_of(next(items('attribute', 'test', 1)))[0].rgb(), encoding)
    source = Source.of(frame)
    small = [torch.nn.functional.adaptive_avg_pool2d(
        torch.from_numpy(p.reshape(*p.shape[:2], -1).copy()).permute(2, 0, 1)[None].float(),
        (84, 112))
        for p in planes(frame)]
    got = source.colours(small)[0].permute(1, 2, 0).numpy()
    if encoding in PACKED:
        got = got[..., PACKED[encoding]]
    expected = rgb_samples(frame, 12, 16).astype(float)
    # The host rounds to bytes at every halving.
    apart = np.abs(got - expected)
    assert apart.mean() < 1.2 and apart.max() < 8
    assert Source.of(Frame(np.zeros(2000, np.uint8), 'nv12', 29, 31, 30)).encoding == 'rgb8'


@pytest.mark.gpu
@pytest.mark.parametrize('encoding', ['rgb8', 'bgra8', 'mono8', 'nv12', 'yuyv'])
@pytest.mark.parametrize(('family', 'slices'), [('relation', 1), ('change', 2)])
def test_the_recorded_net_gives_what_the_plain_one_gives(family, slices, encoding):
    signal = HeadSignal.load(TINY)
    engine = Engine.load(str(TINY), device='cuda', selector=make_selector('uniform'))
    signal.bind(engine)
    plain = SaliencyHead.load(TINY / FILE).double()
    # The first question comes again: weights that were folded for another must be folded anew.
    drawn = list(items(family, 'test', 4))
    for number, item in enumerate((*drawn, drawn[0])):
        frames = [_sent(f.rgb(), encoding) for f in frames_of(item)[::2][:slices]]
        question = item.question.text + ' Now look again.' * (20 * (number == 2))
        got = signal(frames, 12, 16, question)
        source = Source.of(frames[0])
        small = [torch.nn.functional.adaptive_avg_pool2d(torch.stack([
            torch.from_numpy(p.reshape(*p.shape[:2], -1).copy()).permute(2, 0, 1)
            for p in same]).double(), (84, 112)) for same in zip(*map(planes, frames))]
        samples = source.colours(small)[:, list(PACKED.get(encoding, (0, 1, 2)))].double()
        ids = torch.tensor([engine.tokenizer(question)['input_ids']])
        embedded = engine.model.language.embed(ids.cuda()).double().cpu()
        words = plain.words(embedded, torch.ones_like(ids, dtype=torch.bool))
        expected = plain(channels(samples, held_against(samples)), words.expand(slices, -1))
        assert np.abs(got - expected.numpy()).max() < 0.02 * expected.abs().max()
    assert len(signal.graphs) == 1
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize('encoding', ['rgb8', 'nv12'])
def test_every_way_up_to_the_device_gives_the_same_bits(encoding):
    signal = HeadSignal.load(TINY)
    engine = Engine.load(str(TINY), device='cuda', selector=make_selector('uniform'))
    signal.bind(engine)
    frames = [_sent(frames_of(item)[0].rgb(), encoding)
              for item in items('attribute', 'test', 3)]
    whole = Frame.from_rgb(frames[0].rgb())  # rows without padding go up from where they lie
    for shown in ([whole, *frames] if encoding == 'rgb8' else frames):
        first = signal([shown], 12, 16, 'Where is it?')
    net, = signal.graphs.values()
    ids = signal._ids('Where is it?')
    expected = net._replayed([shown])
    assert np.array_equal(first, expected)
    for way in WAYS if net.way is not None else ():
        for other in frames:
            net._launched([other], way)
        assert np.array_equal(net._launched([shown], way), expected)
    # A thread that has not touched the device yet.
    got = []
    thread = threading.Thread(target=lambda: got.append(net.run([shown], ids)))
    thread.start()
    thread.join()
    assert np.array_equal(got[0], expected)
    engine.close()


def _sent(rgb: np.ndarray, encoding: str) -> Frame:
    """Return a picture as a camera sends it, with padded rows."""
    height, width = rgb.shape[:2]
    yuv = cv2.cvtColor(np.ascontiguousarray(rgb), cv2.COLOR_RGB2YUV_I420).reshape(-1)
    y, u, v = np.split(yuv, [height * width, height * width * 5 // 4])
    chroma = np.stack((v, u) if encoding == 'nv21' else (u, v), -1)
    if encoding in ('nv12', 'nv21'):
        rows = np.concatenate((y.reshape(height, width), chroma.reshape(height // 2, width)))
    elif encoding in ('yuyv', 'uyvy'):
        twice = np.repeat(chroma.reshape(height // 2, width // 2, 2), 2, axis=0)
        pair = y.reshape(height, width // 2, 2), twice
        rows = np.stack(pair if encoding == 'yuyv' else pair[::-1], -1).reshape(height, -1)
    elif encoding == 'mono8':
        rows = y.reshape(height, width)
    elif encoding == 'bgra8':
        rows = np.dstack((rgb[..., ::-1], np.full_like(rgb[..., :1], 9))).reshape(height, -1)
    else:
        rows = rgb.reshape(height, -1)
    padded = np.pad(rows, ((0, 0), (0, 6)))
    return Frame(padded.reshape(-1), encoding, width, height, padded.shape[1])
