"""What a report says: figures that can be recomputed, failures, strange texts."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from qwen_vl_ros.cli.common import ask_engine, cost_line
from qwen_vl_ros.engine.errors import EngineError, ErrorCode
from qwen_vl_ros.engine.types import Answer, Delta, Done, Stage, Visual
from qwen_vl_ros.frame import Frame
from qwen_vl_ros.measure import report as reports
from qwen_vl_ros.measure.report_html import render
from qwen_vl_ros.measure.timeline import Timeline
from qwen_vl_ros.pipeline import AskOptions

MACHINE = {'name': 'random', 'dtype': 'float32', 'device': 'cpu'}
MS = 10**6


class Scripted:
    """An engine whose stages last as long as the test says."""

    def __init__(self, spans, text='yes', fail=None):
        self.spans, self.text, self.fail = spans, text, fail

    def answer(self, request, timeline=None, cancelled=lambda: False):
        yield Stage('vision')
        if self.fail:
            raise EngineError(*self.fail)
        at = timeline.start_ns
        for name, ms, cost in self.spans:
            timeline.add(name, at, at + round(ms * MS), **cost)
            at += round(ms * MS)
        yield Delta(self.text, 1)
        yield Done(Answer(self.text, 'stop', (5, 6), 0.5, 8, 4, 20, timeline))


def picture(value=0, width=600, height=300):
    return Visual((Frame.from_rgb(np.full((height, width, 3), value, np.uint8), camera='front'),))


def ask(engine, expected=None, question='Is it?', time_ns=0):
    return ask_engine(engine, question, AskOptions(), lambda: [picture()], expected=expected,
                      time_ns=time_ns)


SPANS = [
    ('encode', 10, {'flops': 2 * 10**9, 'bytes_read': 10**7}),
    ('prefill', 4, {}),
    ('first_token', 1, {}),
    ('token', 2, {'bytes_read': 4 * 10**6, 'bytes_written': 10**6}),
    ('token', 3, {'bytes_read': 4 * 10**6, 'bytes_written': 10**6}),
]


def build(exchanges):
    return reports.build_report('Test', exchanges, model=MACHINE, source={'bag': 'none'})


def test_stage_table_and_summary_follow_from_the_spans():
    slow = [(n, ms * 2, cost) for n, ms, cost in SPANS]
    exchanges = [ask(Scripted(SPANS), 'yes'), ask(Scripted(slow), 'no')]
    rows = {r['stage']: r for r in reports.stage_table(exchanges)}
    assert list(rows) == ['decode_message', 'encode', 'prefill', 'first_token', 'token']
    assert rows['encode'] | {} == {
        'stage': 'encode', 'calls': 2, 'mean_ms': 15, 'p50_ms': 15, 'p95_ms': 19.5, 'max_ms': 20,
        'gb_per_s': pytest.approx(2 * 0.01 / 0.03, abs=1e-3),
        'gflop_per_s': pytest.approx(4 / 0.03, abs=1e-3)}
    # Tokens: the sum of an answer, and rates over all calls.
    assert (rows['token']['calls'], rows['token']['mean_ms']) == (4, 7.5)
    assert rows['token']['gb_per_s'] == pytest.approx(0.02 / 0.015, abs=1e-3)
    assert rows['prefill']['gb_per_s'] is None
    total = reports.summary(exchanges)
    assert total['questions'] == total['answered'] == 2 and total['failed'] == 0
    assert (total['correct'], total['with_known_answer']) == (1, 2)
    assert total['time_to_first_token_ms_p50'] == pytest.approx(22.5, abs=1)
    assert total['total_ms_new_picture_p50'] == pytest.approx(30, abs=1)
    assert total['total_ms_same_picture_p50'] is None
    again = reports.summary([*exchanges, ask(Scripted(SPANS[1:]))])
    assert again['total_ms_same_picture_p50'] == pytest.approx(10, abs=1)
    assert total['decode_tokens_per_s'] == pytest.approx(4 / 0.015, abs=0.01)
    assert (total['vision_tokens_in'], total['vision_tokens_kept']) == (16, 8)


def test_failure_keeps_picture_code_and_reason():
    failed = ask(Scripted([], fail=(ErrorCode.PROMPT_TOO_LONG, '<5000> tokens & more')), 'yes')
    assert (failed.error_code, failed.correct) == ('PROMPT_TOO_LONG', False)
    assert cost_line(failed) == 'PROMPT_TOO_LONG: <5000> tokens & more'
    report = build([failed, ask(Scripted(SPANS), time_ns=7)])
    assert report['summary']['failed'] == 1
    page = render(report, [[f.jpeg for f in failed.frames], []])
    assert 'PROMPT_TOO_LONG: &lt;5000&gt; tokens &amp; more' in page
    assert page.count('data:image/jpeg') == 1 and 'no picture' in page


def test_engine_that_ends_without_an_answer():
    class Silent:
        def answer(self, request, timeline=None, cancelled=lambda: False):
            yield Stage('vision')

    assert ask(Silent()).error == 'the engine ended without an answer'


def test_nothing_answered_is_a_page_too():
    report = build([ask(Scripted([], fail=(ErrorCode.NUMERICAL, 'not finite')))])
    assert 'not finite' in render(report, [[]])
    assert 'No answer, no stages' in render(build([]), [])


def test_round_trip_and_strict_json(tmp_path):
    exchange = ask(Scripted([], text='\x00</script><b>ü\u2028'))
    assert math.isnan(exchange.answer.timeline.time_to_first_token_ms())
    report = build([exchange])
    json_path, html_path = reports.write_report(tmp_path / 'a' / 'b', report, [exchange])
    # NaN is no JSON: what has no value is null.
    loaded = json.loads(json_path.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert loaded['exchanges'][0]['time_to_first_token_ms'] is None
    assert reports.load_report(tmp_path / 'a' / 'b') == loaded
    assert '<b>ü' not in html_path.read_text() and '&lt;b&gt;ü' in html_path.read_text()
    assert loaded['machine']['torch'] and loaded['command'] and loaded['kind'] == 'measured'


@pytest.mark.parametrize('content, expected', [
    ('nonsense', 'does not hold JSON'), ('{"a": 1}', 'no report'), ('[]', 'no report'),
    ('{"format": "qwen_vl_ros.report", "format_version": 99}', 'format version 99')])
def test_files_that_are_no_report(tmp_path, content, expected):
    (tmp_path / 'report.json').write_text(content)
    with pytest.raises(ValueError, match=expected):
        reports.load_report(tmp_path)


def test_thumbnails_are_small_and_keep_the_shape():
    import simplejpeg

    for width, height, want in ((600, 300, (240, 480)), (30, 20, (20, 30)), (5000, 1, (1, 480))):
        jpeg = reports.thumbnail(picture(90, width, height).frames[0])
        assert simplejpeg.decode_jpeg_header(jpeg)[:2] == want


@pytest.mark.parametrize('one, other, same', [
    ('Yes.', ' yes', True), ('two  words', 'Two words.', True), ('<x1><y2>', '<x1><y3>', False),
    ('1', '11', False), ('', '.', True)])
def test_how_answers_are_compared(one, other, same):
    assert (reports.normalised(one) == reports.normalised(other)) == same


def test_pictures_of_one_moment_share_a_card():
    engine = Scripted(SPANS)
    exchanges = [ask(engine, question='One?', time_ns=5), ask(engine, question='Two?', time_ns=5),
                 ask(engine, question='Three?', time_ns=9)]
    page = render(build(exchanges), [[f.jpeg for f in e.frames] for e in exchanges])
    assert page.count('class="card"') == 2 and page.count('data:image/jpeg') == 2
    assert page.index('Two?') < page.rindex('class="card"') < page.index('Three?')


def test_timeline_of_an_exchange_is_the_engines():
    exchange = ask(Scripted(SPANS))
    names = [s['name'] for s in exchange.timeline['spans']]
    assert sorted(names) == sorted(['decode_message', *(n for n, _, _ in SPANS)])
    assert isinstance(exchange.answer.timeline, Timeline)
