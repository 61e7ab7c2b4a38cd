"""``python -m otel_train`` is ``otel-train``."""

import sys

from otel_train.cli import main

sys.exit(main())
