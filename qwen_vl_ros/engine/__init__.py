"""Frames and a question in, a stream of answer events out; knows nothing of ROS."""
