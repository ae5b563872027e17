"""Distils light heads: of any checkpoint (__main__.py), of models/tiny (roboscene.py)."""
