"""Distils the light head of a checkpoint (see __main__.py) and that of models/tiny (roboscene.py)."""
