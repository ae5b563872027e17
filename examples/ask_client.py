"""Ask the node one question and print the answer as it comes: ask_client.py QUESTION [CAMERA]."""

import sys

import rclpy
from qwen_vl_msgs.action import AnswerQuestion
from rclpy.action import ActionClient


def main() -> int:
    len(sys.argv) > 1 or sys.exit(__doc__)
    rclpy.init()
    node = rclpy.create_node('ask_client')
    client = ActionClient(node, AnswerQuestion, '/qwen_vl/answer_question')
    client.wait_for_server(timeout_sec=10.0) or sys.exit('no node /qwen_vl answers questions')
    goal = AnswerQuestion.Goal(question=sys.argv[1], cameras=sys.argv[2:3])
    shown = []

    def show(message):
        shown.append(message.feedback.delta)
        print(shown[-1], end='', flush=True)

    sent = client.send_goal_async(goal, show)
    rclpy.spin_until_future_complete(node, sent)
    ended = sent.result().get_result_async()
    rclpy.spin_until_future_complete(node, ended)
    result = ended.result().result
    print('' if ''.join(shown) == result.answer.text else f'\n{result.answer.text}')
    if result.error_code != AnswerQuestion.Result.NONE:
        print(f'error {result.error_code}: {result.error_msg}', file=sys.stderr)
    return min(result.error_code, 125)


if __name__ == '__main__':
    try:
        sys.exit(main())
    except (KeyboardInterrupt, Exception) as error:  # a signal ends what is waited for
        sys.exit(repr(error) if rclpy.ok() and isinstance(error, Exception) else 130)
