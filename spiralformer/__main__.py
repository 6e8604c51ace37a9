"""`python -m spiralformer`"""

import sys

from spiralformer.cli import main

if __name__ == "__main__":
    sys.exit(main())
