"""Trains the tiny checkpoint that ships in models/tiny (see train.py)."""
