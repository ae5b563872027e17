"""docs/interfaces.md against the running node: names, types, parameters, keys, codes."""

import contextlib
import re
from pathlib import Path

import pytest
from harness import wait_for
from qwen_vl_msgs.action import AnswerQuestion
from qwen_vl_msgs.srv import Ask
from rcl_interfaces.srv import DescribeParameters, ListParameters
from rclpy.action import get_action_server_names_and_types_by_node
from rclpy.node import NodeNameNonExistentError

from qwen_vl_ros.engine.errors import ErrorCode
from qwen_vl_ros.node.parameter import ROS_TYPES
from qwen_vl_ros.node.parameters import Settings

pytestmark = pytest.mark.ros
PAGE = (Path(__file__).parents[2] / 'docs' / 'interfaces.md').read_text()

#: What every node, lifecycle node and action server has; not ours to describe.
COMMON_TOPICS = {'/parameter_events', '/rosout', '/qwen_vl/transition_event'}
COMMON_SERVICES = {
    'describe_parameters', 'get_parameter_types', 'get_parameters', 'list_parameters',
    'set_parameters', 'set_parameters_atomically', 'get_type_description', 'change_state',
    'get_state', 'get_available_states', 'get_available_transitions', 'get_transition_graph'}


def rows(section):
    """Return the cells of the table below a heading, code marks taken off."""
    text = PAGE.split(f'\n## {section}\n')[1].split('\n## ')[0]
    lines = [line for line in text.splitlines() if line.startswith('|')][2:]
    return [[cell.strip().strip('`') for cell in line.strip('|').split('|')] for line in lines]


def absolute(name):
    return name.replace('<camera>', '/camera').replace('~/', '/qwen_vl/').replace('//', '/')


def compare(get, documented):
    """Wait until what the graph tells is what is documented; then, or at the end, compare."""
    def live():
        try:
            return get()
        except NodeNameNonExistentError:
            return None

    with contextlib.suppress(AssertionError):
        wait_for(lambda: live() == documented, 10.0)
    assert live() == documented


def test_topics(node, client):
    documented = {'in': {}, 'out': {}}
    for name, kind, direction, *_ in rows('Topics'):
        documented[direction][absolute(name)] = kind
    # Read only with image_transport compressed; published only where there are several cameras.
    del documented['in']['/camera/image_raw/compressed']
    for name in ('overlay', 'overlay/compressed', 'saliency'):
        del documented['out'][f'/qwen_vl/camera/{name}']
    for direction, get in (
            ('in', client.node.get_subscriber_names_and_types_by_node),
            ('out', client.node.get_publisher_names_and_types_by_node)):
        compare(lambda get=get: {
            name: kinds[0] for name, kinds in get('qwen_vl', '/')
            if name not in COMMON_TOPICS and '/_action/' not in name},
            documented[direction])


def test_services_and_action(node, client):
    documented = {absolute(name): kind for name, kind, _ in rows('Services and action')}

    def live():
        services = client.node.get_service_names_and_types_by_node('qwen_vl', '/')
        actions = get_action_server_names_and_types_by_node(client.node, 'qwen_vl', '/')
        return {name: kinds[0] for name, kinds in (*services, *actions)
                if name.rsplit('/', 1)[1] not in COMMON_SERVICES and '/_action/' not in name}

    compare(live, documented)


def test_parameters(node, client):
    documented = {row[0]: row[1:] for row in rows('Parameters')}
    listed = client.call(ListParameters, '/qwen_vl/list_parameters',
                         ListParameters.Request()).result.names
    names = [name for name in listed if name in documented or '.' in name]
    assert set(documented) == set(names) - {'qos_overrides./clock.subscription.depth'}
    assert set(documented) == {spec.metadata['name'] for spec in Settings.table()}
    descriptors = client.call(
        DescribeParameters, '/qwen_vl/describe_parameters',
        DescribeParameters.Request(names=list(documented))).descriptors
    kinds = {bool: 'bool', int: 'integer', float: 'double', str: 'string', tuple: 'string[]'}
    for spec, live in zip(Settings.table(), descriptors):
        kind, default, limits, when, text = documented[spec.metadata['name']]
        assert live.description == text.replace('\\|', '|')
        assert live.type == ROS_TYPES[type(spec.default)]
        assert kind == kinds[type(spec.default)] and when == spec.metadata['when']
        shown = str(list(spec.default) if isinstance(spec.default, tuple) else spec.default)
        shown = shown.lower() if isinstance(spec.default, bool) else shown.replace("'", '')
        assert default.replace("'", '') == shown
        ranges = [*live.integer_range, *live.floating_point_range]
        if ranges:
            assert limits == f'{ranges[0].from_value} to {ranges[0].to_value}'
        else:
            assert limits == ', '.join(spec.metadata['choices'])


def test_diagnostics(node, client):
    for name, keys, _ in rows('Diagnostics'):
        status = name.replace('<camera>', 'camera')
        values = client.await_status(status, lambda level, message, values: True)[2]
        assert [key.strip('` ') for key in keys.split(',')] == list(values)


def test_error_codes():
    documented = {name: int(code) for code, name, _ in rows('Error codes')}
    assert documented == {code.name: int(code) for code in ErrorCode}
    for kind in (AnswerQuestion.Result, Ask.Response):
        assert documented == {name: getattr(kind, name) for name in documented}


def test_every_constant_of_the_result_is_a_known_code():
    source = Path(__file__).parents[2] / 'qwen_vl_msgs'
    for path in (source / 'srv/Ask.srv', source / 'action/AnswerQuestion.action'):
        found = dict(re.findall(r'^uint16 ([A-Z_]+) = (\d+)', path.read_text(), re.MULTILINE))
        assert {name: int(code) for name, code in found.items()} == {
            code.name: int(code) for code in ErrorCode}
