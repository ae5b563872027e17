"""Recordings for demo and tests: rosbag2 bags from rendered scenes or from a camera clip."""
