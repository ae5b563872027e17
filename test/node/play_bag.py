"""
Plays a recording's raw pictures over DDS, step by step: a player that waits for its listener.

usage: play_bag.py BAG TOPIC < SECONDS
Each line of input is a time of the bag: everything up to it is played, with /clock, then "at" is
said. The end of input ends the player.
"""

import array
import sys
import time

import rclpy
from rclpy.qos import QoSProfile
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image

from qwen_vl_ros.cli.bag import Bag


def main() -> None:
    rclpy.init()
    node = rclpy.create_node('test_player')
    clock = node.create_publisher(Clock, '/clock', 10)
    publisher = node.create_publisher(Image, sys.argv[2], QoSProfile(depth=10))
    while not (publisher.get_subscription_count() and clock.get_subscription_count()):
        time.sleep(0.01)
    time.sleep(1.0)
    with Bag(sys.argv[1]) as bag:
        messages = bag.messages(bag.choose([sys.argv[2]]))
        print('ready', flush=True)
        for line in sys.stdin:
            for _, time_ns, recorded in messages:
                now = Clock()
                now.clock.sec, now.clock.nanosec = divmod(time_ns, 10**9)
                clock.publish(now)
                message = Image(
                    width=recorded.width, height=recorded.height, step=recorded.step,
                    encoding=recorded.encoding, data=array.array('B', recorded.data.tobytes()))
                message.header.frame_id = recorded.header.frame_id
                message.header.stamp.sec = recorded.header.stamp.sec
                message.header.stamp.nanosec = recorded.header.stamp.nanosec
                publisher.publish(message)
                time.sleep(0.02)
                if time_ns - bag.start_ns + 10**6 >= float(line) * 1e9:
                    break
            stamp = message.header.stamp
            print(f'at {stamp.sec}.{stamp.nanosec:09d}', flush=True)


if __name__ == '__main__':
    main()
