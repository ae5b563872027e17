"""
A camera: publishes numbered pictures and says when it is done.

usage: publish_frames.py WIDTH HEIGHT HZ COUNT RELIABILITY [TOPIC] [STAMP: now | zero | SECONDS]
A COUNT of 0 publishes for ever. Byte 0 of each picture is its number (modulo 256).
"""

import array
import sys
import time

import rclpy
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import Image

from qwen_vl_ros.share import use_large_data_profile


def main() -> None:
    width, height, hz, count = (int(text) for text in sys.argv[1:5])
    topic = sys.argv[6] if len(sys.argv) > 6 else 'camera/image_raw'
    stamp = sys.argv[7] if len(sys.argv) > 7 else 'now'
    use_large_data_profile()
    rclpy.init()
    node = rclpy.create_node('test_camera')
    publisher = node.create_publisher(Image, topic, QoSProfile(
        depth=10, reliability=ReliabilityPolicy[sys.argv[5]]))
    message = Image(width=width, height=height, step=width * 3, encoding='rgb8')
    message.header.frame_id = 'test_lens'
    message.data = array.array('B', bytes(width * height * 3))
    print('published on', topic, flush=True)
    while publisher.get_subscription_count() < 1:
        time.sleep(0.01)
    # Let the subscriber look at this publisher before the first frame.
    time.sleep(1.0)
    start, number = time.monotonic(), 0
    while not count or number < count:
        message.data[0] = number % 256
        if stamp == 'now':
            message.header.stamp = node.get_clock().now().to_msg()
        elif stamp != 'zero':
            message.header.stamp.sec = int(stamp)
        publisher.publish(message)
        number += 1
        time.sleep(max(0.0, start + number / hz - time.monotonic()))
    print(f'sent {number}', flush=True)
    time.sleep(1.0)


if __name__ == '__main__':
    main()
