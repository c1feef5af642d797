"""`python -m switchsd`: the same as the command `switchsd`."""

from switchsd.cli import main

raise SystemExit(main())
