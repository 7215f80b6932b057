"""`python -m controld`"""

from controld.app import main

main()
