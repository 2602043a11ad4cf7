"""`python -m zos`: the same as the console script."""

import sys

from zos.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
