"""Which of these tests are collected where."""

from __future__ import annotations

import importlib.util

# `.ci/deploy` makes an environment with the validators, and collects these there only.
collect_ignore = [] if importlib.util.find_spec("kubernetes_validate") else ["offline"]
