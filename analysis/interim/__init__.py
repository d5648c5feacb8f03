"""Interim analyses of a run that goes on: what each gate says so far, and whether more would change it."""

from __future__ import annotations

JOURNAL = "interim.jsonl"
