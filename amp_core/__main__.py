"""``python -m amp_core`` is ``amp backends``; with arguments, it is ``amp``."""

from __future__ import annotations

import sys

from amp_core.cli import main

raise SystemExit(main(sys.argv[1:] or ["backends"]))
