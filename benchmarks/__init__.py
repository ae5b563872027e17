"""What is timed, and how; see run.py."""
