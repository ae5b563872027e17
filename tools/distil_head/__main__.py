"""
Distil a light head for a checkpoint of one's own, from a folder of pictures or a recording.

    python -m tools.distil_head --model ~/models/Qwen2-VL-2B-Instruct --pictures ~/photos \\
        --questions questions.txt
    python -m tools.distil_head --model ~/models/Qwen2-VL-2B-Instruct --bag drive.mcap --rate 1

The teacher is the checkpoint itself: it answers each question about each picture with everything
shown, and Grad-CAM of that answer says which units it leaned on (saliency/grad_cam.py). Maps are
kept in memory, then the head learns to rank units as they do. It is written beside the weights as
saliency_head.safetensors, where the engine looks for it. A few hundred pictures with the questions
that the robot really asks are a start; a tenth of the pictures is set aside and scored.

Pictures are learnt as stills, those of a recording too: the head has no lesson about clips, in
which it ranks the units of each moment by themselves.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qwen_vl_ros.cli.ask import read_picture
from qwen_vl_ros.cli.bag import Bag, BagError
from qwen_vl_ros.cli.common import CliError
from qwen_vl_ros.engine.config import load_config
from qwen_vl_ros.engine.engine import Engine
from qwen_vl_ros.engine.errors import CheckpointError, EngineError
from qwen_vl_ros.engine.patches import grid_of
from qwen_vl_ros.engine.types import Done, Request, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.pipeline import FrameStore
from qwen_vl_ros.saliency.grad_cam import score_units
from qwen_vl_ros.saliency.head import SaliencyHead, channels
from qwen_vl_ros.saliency.next_frame import widen
from qwen_vl_ros.saliency.samples import rgb_samples
from qwen_vl_ros.saliency.selectors import FILE

#: Asked where no file of questions is given.
QUESTIONS = ('What is in front of the robot?', 'Is the path blocked?', 'What do you see?')
PICTURES = ('.jpg', '.jpeg', '.png', '.webp')


@dataclass
class Lesson:
    """
    A picture, a question, and the teacher's map.

    :param samples: the head's input [6, 7 r, 7 c], float16.
    :param words: token embeddings of the question [L, width].
    :param target: distribution over units [r * c].
    :param picture: its number; lessons of one picture are learnt or set aside together.
    """

    samples: Tensor
    words: Tensor
    target: Tensor
    picture: int


def pictures_of(args: argparse.Namespace) -> Iterator[Frame]:
    """Yield the frames of a folder, or of a recording at a fixed rate."""
    if args.pictures:
        for path in sorted(p for p in args.pictures.rglob('*') if p.suffix.lower() in PICTURES):
            try:
                yield read_picture(path)
            except CliError as error:
                print(f'left out: {error}', file=sys.stderr)
        return
    with Bag(args.bag) as bag:
        topics = bag.choose(args.topic)
        store = FrameStore([t.name for t in topics])
        due = dict.fromkeys(store.cameras, 0)
        for topic, time_ns, message in bag.messages(topics, bag.start_ns):
            if message is None or time_ns < due[topic]:
                continue
            frame = store.offer(topic, message, now_ns=time_ns, received_ns=time_ns)
            if frame is not None:
                due[topic] = time_ns + round(1e9 / args.rate)
                yield frame


def lessons(engine: Engine, frames: Iterator[Frame], questions: Sequence[str], layers: int | None,
            limit: int) -> Iterator[Lesson]:
    """
    Let the teacher answer, and yield what its answers leaned on.

    A picture that the model does not take (too narrow) is told of and left out.
    """
    language = engine.model.language
    words = {}
    for question in questions:
        ids = engine.tokenizer(question, add_special_tokens=False)['input_ids']
        words[question] = language.embed(torch.tensor(ids, device=language.device)).float().cpu()
    for number, frame in enumerate(frames):
        if number == limit:
            return
        try:
            grid_of((frame,), engine.options.min_pixels, engine.info.max_pixels,
                    engine.model.config.vision.factor)
        except EngineError as error:
            print(f'left out: {frame.camera}: {error}', file=sys.stderr)
            continue
        for question in questions:
            request = Request(question, (Visual((frame,)),), max_new_tokens=24)
            said = next(e.answer for e in engine.answer(request) if isinstance(e, Done))
            if not said.token_ids:
                continue
            values = widen(score_units(engine, request, layers=layers, answer=said.token_ids)[0])
            rows, columns = values.shape[1:]
            flat = np.sqrt(values.reshape(-1) + 1e-6)
            small = torch.from_numpy(rgb_samples(frame, rows, columns)).permute(2, 0, 1)[None]
            yield Lesson(channels(small)[0].half(), words[question],
                         torch.from_numpy(flat / flat.sum()), number)


def set_aside(lessons: Sequence[Lesson]) -> tuple[list[Lesson], list[Lesson]]:
    """
    Part lessons by picture: every tenth is scored and never learnt.

    :return: those to learn from, and those of the pictures set aside; all are both where there is
        one picture only.
    """
    aside = set(sorted({x.picture for x in lessons})[::10])
    kept_out = [x for x in lessons if x.picture in aside]
    return [x for x in lessons if x.picture not in aside] or kept_out, kept_out


def train(head: SaliencyHead, taught: list[Lesson], steps: int, batch: int, lr: float,
          seed: int = 0) -> None:
    """Fit the head to lessons; pictures of one size share a step."""
    device = head.score.weight.device
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps)
    sizes: dict[tuple[int, ...], list[Lesson]] = {}
    for lesson in taught:
        sizes.setdefault(tuple(lesson.samples.shape), []).append(lesson)
    rng = np.random.default_rng(seed)
    kinds = list(sizes.values())
    shares = np.array([len(k) for k in kinds]) / len(taught)
    for _ in range(steps):
        kind = kinds[rng.choice(len(kinds), p=shares)]
        chosen = [kind[i] for i in rng.integers(0, len(kind), batch)]
        loss = -(torch.stack([x.target for x in chosen]).to(device)
                 * scores_of(head, chosen).log_softmax(-1)).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


def scores_of(head: SaliencyHead, chosen: list[Lesson]) -> Tensor:
    """Return the head's scores [B, r * c] of lessons of one size."""
    device = head.score.weight.device
    words = torch.nn.utils.rnn.pad_sequence([x.words for x in chosen], batch_first=True)
    count = torch.tensor([len(x.words) for x in chosen])
    mask = torch.arange(words.shape[1]) < count[:, None]
    samples = torch.stack([x.samples for x in chosen]).to(device, torch.float32)
    return head(samples, head.words(words.to(device), mask.to(device))).flatten(1)


@torch.no_grad()
def captured(head: SaliencyHead, kept_out: list[Lesson], share: float = 1 / 3) -> float:
    """Return how much of the teacher's squared map the best third of the head's units holds."""
    found = []
    for lesson in kept_out:
        scores = scores_of(head, [lesson])[0].cpu()
        best = scores.topk(max(1, round(share * len(scores)))).indices
        weight = lesson.target.square()
        found.append(float(weight[best].sum() / weight.sum()))
    return float(np.mean(found))


def _count(text: str) -> int:
    """Read a whole number from 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f'{text!r}: expected a whole number of at least 1')
    return value


def _positive(text: str) -> float:
    """Read a finite number over 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f'{text!r}: expected a finite number over 0')
    return value


def _rate(text: str) -> float:
    """Read a learning rate."""
    value = _positive(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f'{text!r}: expected a number over 0 to 1')
    return value


def _folder(text: str) -> Path:
    """Read the name of a folder that there is."""
    path = Path(text)
    if not path.is_dir():
        found = 'is no folder' if path.exists() else 'does not exist'
        raise argparse.ArgumentTypeError(f'{text} {found}; expected a folder of pictures')
    return path


def _questions(text: str) -> tuple[str, ...]:
    """Read a file of questions."""
    try:
        lines = Path(text).read_text(encoding='utf-8').splitlines()
    except OSError as error:
        raise argparse.ArgumentTypeError(f'{text}: {error.strerror}') from None
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(
            f'{text} is not in UTF-8 (byte {error.start}); expected text in UTF-8') from None
    found = tuple(line.strip() for line in lines if line.strip())
    if not found:
        raise argparse.ArgumentTypeError(f'{text} is empty; expected one question a line')
    return found


def _layers_fault(model: Path, layers: int) -> str | None:
    """Return what is wrong with ``--layers`` for a checkpoint; the engine names a bad folder."""
    try:
        most = load_config(model).language.layers
    except CheckpointError:
        most = None
    if layers < 0 or (most is not None and layers > most):
        return (f'argument --layers: {layers}: expected 0 (all) to '
                f'{most or "the number of decoder layers"}')
    return None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; ``--help`` is the manual."""
    p = argparse.ArgumentParser(prog='python -m tools.distil_head', description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--model', type=Path, required=True, help='folder of the checkpoint')
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument('--pictures', type=_folder, help='folder of JPEG, PNG or WebP files')
    source.add_argument('--bag', type=Path, help='rosbag2 folder or file')
    p.add_argument('--topic', action='append', default=[], help='image topic of the bag')
    p.add_argument('--rate', type=_positive, default=1.0,
                   help='pictures a second of the bag (%(default)s)')
    p.add_argument('--questions', type=_questions, default=QUESTIONS, metavar='FILE',
                   help='text file in UTF-8, one question a line')
    p.add_argument('--out', type=Path, help=f'folder that gets {FILE} (default: --model)')
    p.add_argument('--limit', type=_count, default=2000, help='pictures at most (%(default)s)')
    p.add_argument('--layers', type=int, default=0,
                   help='decoder layers that the gradient passes; 0 is all (%(default)s)')
    p.add_argument('--steps', type=_count, default=2000, help='of training (%(default)s)')
    p.add_argument('--batch', type=_count, default=32, help='maps a step (%(default)s)')
    p.add_argument('--lr', type=_rate, default=1e-3,
                   help='largest learning rate, over 0 to 1 (%(default)s)')
    p.add_argument('--max-pixels', type=int, default=512 * 28 * 28,
                   help='larger pictures are reduced to it (%(default)s)')
    p.add_argument('--device', default='auto')
    args = p.parse_args(argv)
    # Before the work, not after it.
    fault = _layers_fault(args.model, args.layers)
    if fault:
        p.error(fault)
    out = args.out or args.model
    try:
        if args.out:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        p.error(f'{error.filename}: {error.strerror}')
    if args.out and not os.access(out, os.W_OK | os.X_OK):
        p.error(f'{out} cannot be written to; --out chooses another folder')
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the program; 1 when there was nothing to learn from, or a file cannot be used."""
    try:
        return distil(parse(argv))
    except (EngineError, BagError) as error:
        print(f'distil_head: {error}', file=sys.stderr)
        return 1


def distil(args: argparse.Namespace) -> int:
    """Teach a head and write it; 1 when there was nothing to learn from."""
    questions = args.questions
    engine = Engine.load(str(args.model), device=args.device, max_pixels=args.max_pixels)
    begin = time.monotonic()
    taught = list(lessons(engine, pictures_of(args), questions, args.layers or None, args.limit))
    if len(taught) < 2:
        print(f'{len(taught)} answers to learn from; expected at least 2 (a folder with pictures, '
              'or a bag with image topics)', file=sys.stderr)
        return 1
    print(f'{len(taught)} maps in {time.monotonic() - begin:.0f} s', flush=True)
    count = len(taught)
    taught, kept_out = set_aside(taught)
    torch.manual_seed(0)
    device = engine.model.device
    head = SaliencyHead(taught[0].words.shape[1]).to(device)
    # Stills teach nothing about differences within a clip, which must not add chance to its map.
    with torch.no_grad():
        head.first.weight[:, 3:] = 0
    before = captured(head, kept_out)
    train(head, taught, args.steps, args.batch, args.lr)
    after = captured(head, kept_out)
    print(f'a third of the units holds {after:.2f} of the maps of pictures set aside '
          f'({before:.2f} before training)')
    path = (args.out or args.model) / FILE
    head.save(path, {'checkpoint': engine.info.name, 'revision': engine.info.revision,
                     'maps': str(count), 'questions': str(len(questions))})
    print(f'wrote {path}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
