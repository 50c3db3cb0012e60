"""`python -m rollart`."""

import sys

from rollart.cli import main

if __name__ == "__main__":
    sys.exit(main())
