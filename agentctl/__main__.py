"""`python -m agentctl`"""

from agentctl.main import main

main()
