"""Looks at a store step by step, as a load would, and names the first cause of each failure."""

from streamer.doctor.checks import Check, Diagnosis
from streamer.doctor.diagnose import diagnose

__all__ = ["Check", "Diagnosis", "diagnose"]
