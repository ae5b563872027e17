"""
The demo: a robot's camera is recorded, asked about, and the answers held against the truth.

Run by ``make demo``. Renders scenes, writes them as a rosbag2 recording, replays it through the
package's own path (bag, image decoding, newest frame, engine) with the checkpoint that comes with
the package, and writes report.json and report.html.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from qwen_vl_ros.cli.bag import BagError  # noqa: E402
from qwen_vl_ros.cli.common import CliError  # noqa: E402
from qwen_vl_ros.cli.main import main as qwen_vl  # noqa: E402
from qwen_vl_ros.measure.report import load_report  # noqa: E402

#: Grows when the recording would come out differently, so that an older one is made again.
RECORDING = 1

TOPIC = '/camera/front/image_raw'


def make_recording(folder: Path, seed: int) -> Path:
    """Return the demo's bag; written on the first run."""
    bag = folder / f'scenes_{RECORDING}_{seed}'
    if (bag / 'questions.json').exists():
        return bag
    shutil.rmtree(bag, ignore_errors=True)
    print('rendering the scenes and writing the recording (once) ...', flush=True)
    subprocess.run([sys.executable, '-m', 'tools.make_bags', str(bag), '--seed', str(seed)],
                   cwd=ROOT, check=True)
    return bag


def main() -> int:
    """Run the demo; 0 when every question was answered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument('--output', type=Path, default=ROOT / 'build' / 'demo')
    parser.add_argument('--model', type=Path, default=ROOT / 'models' / 'tiny')
    parser.add_argument('--seed', type=int, default=0, help='other scenes')
    parser.add_argument('--compressed', action='store_true', help='read the JPEG topic')
    args = parser.parse_args()
    output = args.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    try:
        bag = make_recording(output, args.seed)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f'demo: the recording could not be made: {error}', file=sys.stderr)
        return 2
    topic = TOPIC + ('/compressed' if args.compressed else '')
    code = qwen_vl([
        'replay', str(bag), '--questions', str(bag / 'questions.json'), '--topic', topic,
        '--rate', '30', '--model', str(args.model), '--report', str(output),
        '--title', 'Questions about rendered robot scenes'])
    if code == 0:
        show_truth(output, bag)
    return code


def show_truth(output: Path, bag: Path) -> None:
    """Say how many answers were right, for each kind of question."""
    report = load_report(output)
    kinds = [row['note'] for row in json.loads((bag / 'questions.json').read_text())]
    print('\nright answers (the scenes are rendered, so the truth is known)')
    for kind in dict.fromkeys(kinds):
        marks = [e['correct'] for k, e in zip(kinds, report['exchanges'])
                 if k == kind and 'correct' in e]
        if marks:
            print(f'  {kind:<12}{sum(marks):>3} of {len(marks)}')
    total = report['summary']
    print(f'  {"all":<12}{total["correct"]:>3} of {total["with_known_answer"]}')
    print(f'\nlook at {output / "report.html"}')


if __name__ == '__main__':
    try:
        sys.exit(main())
    except (BagError, CliError) as error:
        sys.exit(f'demo: {error}')
