"""`python -m midstream`."""

import sys

from midstream.cli import main

if __name__ == "__main__":
    sys.exit(main())
