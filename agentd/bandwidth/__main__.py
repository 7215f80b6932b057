"""`python -m agentd.bandwidth`, started by agentd."""

import sys

from agentd.bandwidth.app import main

sys.exit(main())
