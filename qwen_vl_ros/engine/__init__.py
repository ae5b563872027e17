"""Frames and a question in, a stream of answer events out; knows nothing of ROS."""

import os

# Idle OpenMP threads spin by default. On a robot, where other processes want the same cores, a
# spinning thread holds up the one that it waits for: measured on 2 busy cores, one answer took
# 4.5 s spinning and 0.3 s sleeping. Read when torch is loaded, so this must come before.
os.environ.setdefault('OMP_WAIT_POLICY', 'PASSIVE')
