"""Measures one thing: `python -m scripts.benchmarks NAME [OPTIONS]`."""

import sys

from scripts.benchmarks.harness import main

sys.exit(main())
