"""
From a frame in host memory to the first token of an answer, beside transformers.

Both have the same random weights of an official shape, the same pictures and the same question;
each picture is new, nothing is reused. Wall clock around the whole call: patches, upload, encoder,
prompt, prefill, choice. transformers gets its Pillow processor on the CPU, as it comes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

from benchmarks.records import Record, median, record
from benchmarks.stages._halves import COMPILED, EAGER, Halves, wall_ms
from benchmarks.stages._reference import PilProcessor, Reference, compile_blocks
from benchmarks.stages.answer import QUESTION, ask, picture
from qwen_vl_ros.engine.checkpoint import Checkpoint, canonical, load_tokenizer
from qwen_vl_ros.engine.config import load_config
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.options import Options
from qwen_vl_ros.share import share

#: Stages of the timeline that are told apart.
PARTS = ('patches', 'upload', 'encode', 'prefill', 'first_token')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument('--shape', choices=('2b', '7b'), default='2b')
    parser.add_argument('--dtype', choices=('bfloat16', 'float16'), default='bfloat16')
    parser.add_argument('--size', nargs='+', default=['640x480', '1280x720'])
    parser.add_argument('--keep', type=float, nargs='+', default=[1.0, 0.5, 0.33])
    parser.add_argument('--seconds', type=float, default=1.5, help='for each thing that is timed')
    parser.add_argument('--no-compiled', action='store_true', help='leave torch.compile out')


class Loaded(Reference):
    """transformers' model that is in memory already; see Reference."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device,
                 limits: tuple[int, int]) -> None:
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.processor = PilProcessor(
            size={'shortest_edge': limits[0], 'longest_edge': limits[1]})


def run(args: argparse.Namespace) -> list[Record]:
    """Time all sizes."""
    folder = share('models', 'tiny')
    small = load_config(folder)
    ids = {'image_token_id': small.image_token, 'video_token_id': small.video_token,
           'vision_start_token_id': small.vision_start_token,
           'vision_end_token_id': small.vision_end_token}
    halves = Halves(args.shape, getattr(torch, args.dtype), **ids)
    config = replace(small, vision=halves.shape.vision, language=halves.shape.language,
                     tied=halves.shape.tied, pixel_limit=None)
    tokenizer, template = load_tokenizer(folder, config)
    tensors = {canonical(k): v for k, v in halves.reference.state_dict().items()}
    if halves.shape.tied:
        tensors.pop('lm_head.weight', None)
    engine = Engine(Checkpoint(config, tokenizer, template, tensors, args.shape, 'random'),
                    Options(repetition_window=0))
    # Nothing may end an answer early.
    engine.end_tokens = frozenset()
    theirs = Loaded(halves.reference, tokenizer, halves.device,
                    (engine.info.min_pixels, engine.info.max_pixels))
    del halves.vision, halves.language
    found: list[Record] = []
    ours: dict[str, list[float]] = {}
    for size in args.size:
        found += one_size(engine, theirs, args, size, ours)
    if not args.no_compiled:
        compile_blocks(*theirs.model.model.visual.blocks,
                       *theirs.model.model.language_model.layers)
        for size in args.size:
            shown = pictures(size)
            other = median(wall_ms(
                lambda i, shown=shown: theirs.answer(shown[i % 8], QUESTION, 1),  # type: ignore
                args.seconds))
            found.append(record('first_token', case(args, size, 1.0), 'ms', median(ours[size]),
                                'ms', times=ours[size], baseline=(COMPILED, other)))
    engine.close()
    return found


def case(args: argparse.Namespace, size: str, keep: float, **more: Any) -> dict[str, Any]:
    """Return the keys that name a measurement."""
    return {'model': args.shape, 'dtype': args.dtype, 'size': size, 'keep': keep, 'path': 'cuda',
            **more}


def pictures(size: str) -> list[Any]:
    """Return eight pictures of a size."""
    width, height = map(int, size.split('x'))
    return [picture((width, height), seed) for seed in range(8)]


def one_size(engine: Engine, theirs: Reference, args: argparse.Namespace, size: str,
             ours: dict[str, list[float]]) -> list[Record]:
    """Time one picture size."""
    shown = pictures(size)
    other = median(wall_ms(lambda i: theirs.answer(shown[i % 8], QUESTION, 1), args.seconds))
    found = []
    for keep in args.keep:
        spans: dict[str, list[float]] = {}

        def work(i: int, keep: float = keep, spans: dict[str, list[float]] = spans) -> None:
            line = ask(engine, shown[i % 8], 1, keep)
            for name in PARTS:
                spans.setdefault(name, []).append(line.ms(name))

        work(0)
        spans.clear()
        times = wall_ms(work, args.seconds)
        if keep == 1:
            ours[size] = times
        note = 'the baseline sees all tokens' if keep < 1 else ''
        found.append(record('first_token', case(args, size, keep), 'ms', median(times), 'ms',
                            times=times, baseline=(EAGER, other), note=note))
        found += [record('first_token', case(args, size, keep, variant=name), 'ms', median(part),
                         'ms', times=part, note='a part of it, from the timeline')
                  for name, part in spans.items()]
    return found
