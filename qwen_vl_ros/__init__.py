"""Ask what a robot's camera sees: Qwen2-VL answers for ROS 2, with what each answer cost."""

__version__ = '0.1.0'
