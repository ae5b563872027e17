"""Ask the node one question and print the answer as it comes: ask_client.py QUESTION [CAMERA]."""

import sys

import rclpy
from qwen_vl_msgs.action import AnswerQuestion
from rclpy.action import ActionClient


def main() -> int:
    rclpy.init()
    node = rclpy.create_node('ask_client')
    client = ActionClient(node, AnswerQuestion, '/qwen_vl/answer_question')
    if not client.wait_for_server(timeout_sec=10.0):
        print('no node /qwen_vl answers questions', file=sys.stderr)
        return 1
    goal = AnswerQuestion.Goal(question=sys.argv[1], cameras=sys.argv[2:3])
    goal.deadline.sec = 20
    sent = client.send_goal_async(
        goal, lambda message: print(message.feedback.delta, end='', flush=True))
    rclpy.spin_until_future_complete(node, sent)
    ended = sent.result().get_result_async()
    try:
        rclpy.spin_until_future_complete(node, ended)
    except KeyboardInterrupt:
        sent.result().cancel_goal_async()
        rclpy.spin_until_future_complete(node, ended)
    result = ended.result().result
    print()
    if result.error_code != AnswerQuestion.Result.NONE:
        print(f'error {result.error_code}: {result.error_msg}', file=sys.stderr)
    return min(result.error_code, 125)


if __name__ == '__main__':
    sys.exit(main())
