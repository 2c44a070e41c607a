"""`python -m headwater.producer.cli` is the `headwater` command."""

from .app import main

main()
