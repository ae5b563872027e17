"""Timelines, rooflines, device sensors, reports: every number the package prints is made here."""
