"""`python -m agentd.heartbeat`, started by agentd."""

import sys

from agentd.heartbeat.app import main

sys.exit(main())
