"""`python -m tidegate.cli`, as `tidegate up` starts the gateway."""

from tidegate.cli import main

main()
