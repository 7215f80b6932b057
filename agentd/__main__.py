"""`python -m agentd`"""

from agentd.app import main

main()
