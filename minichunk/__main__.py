"""`python -m minichunk` is the `minichunk` command."""

import sys

from minichunk.cli import main

sys.exit(main())
