"""`python -m agentd.filler`: see app."""

import sys

from agentd.filler.app import main

sys.exit(main())
